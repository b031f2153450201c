"""The modules of the model as modules of a partitioned model, which hold this process's parameters and buffers.

    model    GPT( embed: Embedding, blocks: ModuleList( 0: Block( ... )))          parameters of the model
    pm       PartitionedModel( embed, blocks( 0( ... )))                          parameters of this process, under the same names

A part of a partitioned model is an instance of ``Part``. Python's ``isinstance`` takes it for an instance of the class that it stands for,
and its options (``in_features``, ``eps``) are those of the model. It computes nothing: programs do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.module.attributes import is_traced_attribute, read_attribute
from partitioner.runtime.state.checkpoint.load_safetensors import load_safetensors
from partitioner.runtime.state.checkpoint.load_state import load_state
from partitioner.runtime.state.gather import GatheredState
from partitioner.runtime.state.hooks import refuse_hooks
from partitioner.runtime.state.parameters import State
from partitioner.runtime.state.part_gradient import plain
from partitioner.specialize.make_trace import modes_after_train, modes_of
from partitioner.tracing.restore import Structure
from passes.ir.arguments.checked import checked_arguments
from passes.ir.errors import ConfigError, Place


@dataclass(frozen=True, eq=False)
class Source:
    """Module of the original that a part represents.

    Attributes:
        module: of the model.
        path: of it.
        state: the tensors of this process.
        gathered: assembles those of all processes.
        structure: the whole model when it was partitioned.
        left: what calls have left in attributes of modules.
    """

    module: nn.Module
    path: str
    state: State
    gathered: GatheredState
    structure: Structure
    left: LeftAttributes

    @property
    def prefix(self) -> str:
        """Prefix of the names of its parameters."""
        return f"{self.path}." if self.path else ""

    @property
    def device(self) -> torch.device | None:
        """Device of the first parameter or buffer that this process holds; None if it holds none."""
        tensors = (tensor for _, tensor in (*self.state.named_parameters(), *self.state.named_buffers()))
        return next((tensor.device for tensor in tensors), None)


class ModuleInPlan(nn.Module):
    """A traced module whose tensors are placed by a plan: its structure and options are fixed."""

    def stand_for(self, source: Source) -> None:
        """Set the module of the model that this one stands for; its own attributes are set before."""
        self.__dict__["_source"] = source

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module, else an attribute of the model; see ``attributes.read_attribute``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            source = self.__dict__.get("_source")
            if source is None or (name.startswith("__") and name.endswith("__")):
                raise
        if source.left.has(source.path, name):
            return source.left.read(source.path, name)
        return read_attribute(source.module, name, source.path, source.device)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that the model has not; what was traced is refused."""
        source: Source | None = self.__dict__.get("_source")
        if source is not None and source.left.has(source.path, name):
            source.left.assign(source.path, name, value)
            return
        if source is None or name == "training" or (name in self.__dict__ and name not in vars(source.module)):
            super().__setattr__(name, value)
            return
        is_registered = any(name in self.__dict__[table] for table in ("_parameters", "_buffers", "_modules"))
        if is_registered and getattr(self, name) is value:
            return  # as in-place operators do: pm.weight *= 2
        if is_registered or isinstance(value, nn.Parameter | nn.Module):
            _refuse_structure(source, name)
        if is_traced_attribute(source.module, name, value):
            raise ConfigError(
                f"{source.prefix}{name} was read while the model was traced, and programs compute with the value that it had",
                place=Place(module=source.path),
                remedy=f"set {name} on the model, and partition it again",
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        source: Source | None = self.__dict__.get("_source")
        if source is not None and any(name in self.__dict__[table] for table in ("_parameters", "_buffers", "_modules")):
            _refuse_structure(source, name)
        super().__delattr__(name)

    # -- structure -----------------------------------------------------------------------------------------------------------------

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused: programs would not call another module."""
        self._registered(name, lambda: super(ModuleInPlan, self).add_module(name, module))

    def register_module(self, name: str, module: nn.Module | None) -> None:
        """Refused: programs would not call another module."""
        self._registered(name, lambda: super(ModuleInPlan, self).register_module(name, module))

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        """Refused: programs would not call another module."""
        self._registered(target, lambda: super(ModuleInPlan, self).set_submodule(target, module, strict))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refused: programs would not read another parameter."""
        self._registered(name, lambda: super(ModuleInPlan, self).register_parameter(name, param))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Refused: programs would not read another buffer."""
        self._registered(name, lambda: super(ModuleInPlan, self).register_buffer(name, tensor, persistent))

    def _registered(self, name: str, register: Callable[[], None]) -> None:
        source: Source | None = self.__dict__.get("_source")
        if source is not None:
            _refuse_structure(source, name)
        register()

    def train(self, mode: bool = True) -> Self:
        """Set the modes that ``train(mode)`` of the model sets; the next call runs in them."""
        source: Source | None = self.__dict__.get("_source")
        if source is None:
            return super().train(mode)
        parts = list(self.modules())
        modes: Sequence[bool] = [mode] * len(parts)
        if mode not in (True, False) or any(_has_own_train(part) for part in parts):  # which refuses what is no bool
            with source.structure.restored():
                modes = modes_after_train(source.module, modes_of(self), mode)
        for part, is_training in zip(parts, modes, strict=True):
            part.__dict__["training"] = is_training
        return self

    def apply(self, fn: Any) -> Any:
        """Refused: a function of one module would see this process's tensors of a layer, and another process others."""
        raise ConfigError(
            "apply(fn) would change this process's copies or parts of the parameters of a layer, and ranks would diverge",
            remedy="model.apply(fn) before partition(model, ...); or pm.initialize(fn) for a model from the meta device",
        )

    # -- conversion ----------------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Do nothing if the tensors have the dtype and device of ``to()``, ``float()``, ``cuda()`` already; refuse any other conversion."""
        for name, tensor in (*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)):
            for each in (tensor, *([] if tensor.grad is None else [plain(tensor.grad)])):
                try:
                    with torch.no_grad():
                        converted = fn(each)
                except NotImplementedError:  # a tensor on the meta device has no values to move
                    converted = None
                if converted is not each and not _is_on_cpu_already(each, converted):
                    _refuse_conversion(f"{self.__dict__['_source'].prefix}{name}", each, converted)
        return self

    # -- state ---------------------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the parameters and buffers below, whole, on every rank. What some rank does not hold whole is gathered by all ranks."""
        source: Source = self.__dict__["_source"]
        destination, prefix, keep_vars = _state_arguments(*args, **kwargs)
        held = source.gathered.state_dict(source.prefix)
        if not keep_vars:
            held = _untied(source.state, held)
        else:
            held = {name: _variable(source.state, name, tensor) for name, tensor in held.items()}
        destination.update({f"{prefix}{name.removeprefix(source.prefix)}": tensor for name, tensor in held.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values into parameters and buffers; see ``PartitionedModel.load_state_dict``."""
        source: Source = self.__dict__["_source"]
        if assign:
            raise ConfigError("assign=True would give the model other tensors, and its plan says where each one is", remedy="leave it out")
        tensors = {f"{source.prefix}{name}": value for name, value in state_dict.items()}
        return load_state(source.state, tensors, strict=strict, prefix=source.prefix)

    @checked_arguments()
    def load_safetensors(self, path: str | Path, *, strict: bool = True) -> Any:
        """Load a safetensors file, or a folder of several with an index: each rank reads its own slices. Every rank must call it.

        Names are those of the original model. No rank reads or holds more than its part of a sharded tensor; values are converted to the
        dtype of the parameter. A model from the meta device has all its values then: buffers that no file has (rotary frequencies, masks)
        are computed as the constructors of the model compute them.

        Args:
            path: of a file, of an index, or of a folder with either.
            strict: refuse names that are missing or unknown. One name of a tied parameter is enough.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does.

        Raises:
            ConfigError: files are missing or damaged, or an entry does not fit; nothing is loaded then.
        """
        refuse_hooks(self, "load_safetensors()")
        source: Source = self.__dict__["_source"]
        return load_safetensors(source.state, source.gathered.runtime, Path(path), strict=strict, prefix=source.prefix)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the entries for this module from the state of a module around it; its parts have nothing left to load."""
        source: Source = self.__dict__["_source"]
        if source.path:
            return
        if local_metadata.get("assign_to_params_buffers", False):
            error_msgs.append("assign=True would give a partitioned model other tensors; its plan says where each one is")
            return
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        result = load_state(source.state, own, strict=False)
        missing_keys += [f"{prefix}{name}" for name in result.missing_keys]
        unexpected_keys += [f"{prefix}{name}" for name in result.unexpected_keys]


class Part(ModuleInPlan):
    """A module of the model inside a partitioned model; see the module's docstring."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the module that it stands for, for ``isinstance``."""
        source = self.__dict__.get("_source")
        return type(self) if source is None else type(source.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the layers of a partitioned model are computed by the programs of all ranks."""
        self._refuse("cannot be called alone: its layers are computed by the programs of the whole model", "call the partitioned model")

    def extra_repr(self) -> str:
        source: Source = self.__dict__["_source"]
        return source.module.extra_repr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a part is a view of the partitioned model."""
        self._refuse("cannot be copied or pickled alone", "copy the partitioned model")

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        source: Source = self.__dict__["_source"]
        raise ConfigError(f"{source.path} of a partitioned model {what}", place=Place(module=source.path), remedy=remedy)


class _PartList(Part, nn.ModuleList):
    """A list of modules."""


class _PartDict(Part, nn.ModuleDict):
    """A dict of modules. It would delete from its table, and not by ``delattr`` as others do."""

    def __delitem__(self, key: str) -> None:
        _refuse_structure(self.__dict__["_source"], key)

    def clear(self) -> None:
        """Refused: programs would go on with the modules."""
        _refuse_structure(self.__dict__["_source"], "clear()")


class _PartSequence(Part, nn.Sequential):
    """A sequence of modules."""


class _PartParameterList(Part, nn.ParameterList):
    """A list of parameters."""


class _PartParameterDict(Part, nn.ParameterDict):
    """A dict of parameters."""


_CONTAINERS: Mapping[type[nn.Module], type[Part]] = {
    nn.ModuleList: _PartList,
    nn.ModuleDict: _PartDict,
    nn.Sequential: _PartSequence,
    nn.ParameterList: _PartParameterList,
    nn.ParameterDict: _PartParameterDict,
}
"""Containers of torch, whose items can be read by index or key -> the parts that can."""


_OF_CONTAINERS = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__", "keys", "values", "items")
"""Methods of containers by which their items are read, or would be replaced."""


def container_methods(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the methods that a partitioned model needs to have the items of the container that the model is; none for other models."""
    kind = next((container for container in _CONTAINERS if isinstance(model, container)), None)
    return {name: _of_container(name) for name in _OF_CONTAINERS if kind is not None and hasattr(kind, name)}


def _of_container(name: str) -> Callable[..., Any]:
    """Return a method that does what that of a part for the container does."""

    def method(self: ModuleInPlan, *args: Any) -> Any:
        source: Source = self.__dict__["_source"]
        part = new_part(source.module)
        part.__dict__.update({table: self.__dict__[table] for table in ("_parameters", "_buffers", "_modules")})
        part.stand_for(source)
        return getattr(type(part), name)(part, *args)

    method.__name__ = name
    return method


def _refused_hook(method: str) -> Callable[..., NoReturn]:
    """Return a method that refuses hooks of a part."""

    @functools.wraps(getattr(nn.Module, method))
    def refuse(self: Part, *_args: Any, **_kwargs: Any) -> NoReturn:
        self._refuse(
            f"cannot have hooks ({method}): programs do not call modules",
            "register forward hooks on the module of the model before it is partitioned, or hooks on the partitioned model as a whole",
        )

    return refuse


HOOKS = tuple(name for name, _ in inspect.getmembers(nn.Module, inspect.isfunction) if name.startswith("register_") and "hook" in name)
"""The methods of a module that register hooks."""

for _method in HOOKS:
    setattr(Part, _method, _refused_hook(_method))


def _has_own_train(part: nn.Module) -> bool:
    """Return whether the module of a part overrides ``nn.Module.train``."""
    module: nn.Module = part.__dict__["_source"].module
    return type(module).train is not nn.Module.train or "train" in vars(module)


def new_part(module: nn.Module) -> Part:
    """Return a part without content, with the items of the container that the module is."""
    kind = next((part for container, part in _CONTAINERS.items() if isinstance(module, container)), Part)
    part = kind.__new__(kind)
    nn.Module.__init__(part)
    return part


def _state_arguments(
    destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
) -> tuple[dict[str, Any], str, bool]:
    """Return the arguments of ``state_dict``, which may be passed by position."""
    return ({} if destination is None else destination), prefix, keep_vars


def _untied(state: State, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, those of further names of a tied parameter in memory of their own: safetensors saves no tensor twice."""
    is_first = {key: state.renamed.get(key, key) == state.first_name(key) for key in tensors}
    return {key: tensor if is_first[key] else tensor.clone() for key, tensor in tensors.items()}


def _variable(state: State, name: str, tensor: Tensor) -> Tensor:
    """Return the parameter or buffer of this process itself if it holds it whole, else the tensor."""
    block, held = next(iter(state.held(name)), (None, None))
    return held if held is not None and block is not None and block.is_whole else tensor


def _refuse_structure(source: Source, name: str) -> NoReturn:
    raise ConfigError(
        f"{source.prefix}{name} cannot be set: programs of a partitioned model read the parameters, buffers and modules that were traced",
        place=Place(module=source.path),
        remedy="change the model before it is partitioned, as in partition(get_peft_model(model, ...), ...); or change values in place: "
        "pm.load_state_dict(...), parameter.copy_(...)",
    )


def _is_on_cpu_already(tensor: Tensor, converted: object) -> bool:
    """Return whether a conversion changes nothing on the CPU: ``to("cpu:0")``, as called by accelerate, copies tensors on ``cpu``."""
    if not isinstance(converted, Tensor) or not tensor.device.type == converted.device.type == "cpu":
        return False
    is_alike = (tensor.dtype, tensor.shape, tensor.stride()) == (converted.dtype, converted.shape, converted.stride())
    return is_alike and torch.equal(tensor, converted)


def _refuse_conversion(name: str, tensor: Tensor, converted: object) -> NoReturn:
    """Raise ConfigError for a tensor that would be converted or moved."""
    to = f"{converted.dtype} on {converted.device}, another tensor" if isinstance(converted, Tensor) else "another tensor"
    raise ConfigError(
        f"a partitioned model cannot be moved or converted: {name} is {tensor.dtype} on {tensor.device}, and would become {to}; "
        "the plan says where every tensor is, and programs compute in the dtypes that were traced",
        remedy="convert the model first, or name other devices: partition(model.double(), devices=[...]), or "
        'partition(model, precision="bf16-true"); a model on the meta device gets its values by pm.initialize(init_fn)',
    )
