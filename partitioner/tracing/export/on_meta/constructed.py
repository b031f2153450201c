"""Compute the buffers, and the tensors among attributes, of a model on the meta device as its constructors compute them.

No checkpoint has non-persistent buffers (frequencies of rotary embeddings, positions, masks), and the meta device keeps no values.
The constructor of their module runs again, recorded (see ``recorded_constructor``), with the arguments that the module keeps as attributes:

    LlamaForCausalLM(config)      keeps config
      model.rotary_emb            LlamaRotaryEmbedding(config, device=None) keeps config: it runs again
      model.layers.0.attention    Attention(width, scale) keeps no scale: the constructor of the model, which does keep all, runs instead

A value is used only if nothing else could have been meant: the new module has the same attributes and shapes, and arguments that are not
kept are flags that change nothing. If another value is possible, an error names the tensor and the reason.

While such a model is traced as one on the CPU, the tensors among its attributes have these values.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from partitioner.tracing.export.on_meta.recorded_constructor import RecordedConstructor, run_recorded
from partitioner.tracing.restore import own_attributes
from passes.ir.torch_private import tree_leaves, tree_map_only

_Found = Tensor | str
"""A tensor, or why there is none: a clause."""

_Read = Callable[[nn.Module], Any]
"""Returns the tensor of a module."""

_MOST_FLAGS = 3
"""A constructor runs with every value of the flags that a module does not keep, if they are no more than these."""


@dataclass(frozen=True)
class ConstructedTensors:
    """Computes tensors of a model on the meta device.

    Attributes:
        modules: path -> module of the model, when it was partitioned.
        built: path of a module, default dtype -> what its constructor gave, for every value of the flags; a clause if it did not run.
    """

    modules: Mapping[str, nn.Module]
    built: dict[tuple[str, torch.dtype], Sequence[tuple[nn.Module, RecordedConstructor]] | str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> ConstructedTensors:
        """Return those of a model."""
        return cls(dict(model.named_modules(remove_duplicate=False)))

    def buffer(self, name: str) -> _Found:
        """Return the values of a buffer, by name, on the CPU; a reason if they are not known."""
        path, _, key = name.rpartition(".")
        like = getattr(self.modules[path], key)
        return self._found(path, lambda module: dict(module.named_buffers(recurse=False)).get(key), like)

    def attribute(self, tensor: Tensor) -> _Found:
        """Return the values of a tensor that a module has among its attributes, on the CPU; a reason if they are not known."""
        for path, module in self.modules.items():
            for key, value in own_attributes(module).items():
                index = next((index for index, leaf in enumerate(tree_leaves(value)) if leaf is tensor), None)
                if index is not None:
                    return self._found(path, lambda module, key=key, index=index: _leaf(module, key, index), tensor)  # type: ignore[misc]
        return "it is no attribute of a module"

    def _found(self, path: str, read: _Read, like: Tensor) -> _Found:
        """Return the tensor that ``read`` gives of the module at a path: from its constructor, else from those of modules around it."""
        reasons = []
        for around in _paths_around(path):
            found = self._of_constructor(around, path, read, like)
            if isinstance(found, Tensor):
                return found
            reasons.append(found)
        return reasons[0]

    def _of_constructor(self, around: str, path: str, read: _Read, like: Tensor) -> _Found:
        """Return the tensor of the module at ``path``, as the constructor of ``around`` computes it, in the dtype of ``like``.

        A model may have been constructed in another default dtype than that of now, or converted afterwards. Where that gives other
        values, it is not known which was done.
        """
        found = self._in_default_dtype(torch.get_default_dtype(), around, path, read, like)
        if isinstance(found, str) or found.dtype == like.dtype:
            return found
        if found.is_floating_point() != like.is_floating_point():
            return f"its constructor makes it {found.dtype}, and it is {like.dtype}"
        converted = found.to(like.dtype)
        other = self._in_default_dtype(like.dtype, around, path, read, like) if like.is_floating_point() else None
        is_ambiguous = isinstance(other, Tensor) and other.dtype == like.dtype and not torch.equal(other, converted)
        return f"a model constructed in {like.dtype} has other values of it than a model converted to that" if is_ambiguous else converted

    def _in_default_dtype(self, dtype: torch.dtype, around: str, path: str, read: _Read, like: Tensor) -> _Found:
        if (around, dtype) not in self.built:
            self.built[around, dtype] = _constructed(self.modules[around], dtype)
        built = self.built[around, dtype]
        if isinstance(built, str):
            return built
        values: list[Tensor] = []
        for root, record in built:
            module = self._counterpart(root, around, path)
            tensor = module if isinstance(module, str) else read(module)
            if isinstance(tensor, str):
                return tensor
            if not isinstance(tensor, Tensor) or tensor.shape != like.shape:
                return "its constructor makes no such tensor"
            value = record.value(tensor)
            if value is None:
                return "its values are random, or never set"
            values.append(value)
        if any(value.dtype != values[0].dtype or not torch.equal(value, values[0]) for value in values):
            return "its constructor has a flag that it does not keep"
        return values[0]

    def _counterpart(self, root: nn.Module, around: str, path: str) -> nn.Module | str:
        """Return the module at ``path`` below a new module that stands for ``around``, if it is like that of the model."""
        arguments = _kept_arguments(self.modules[around])
        kept = frozenset() if isinstance(arguments, str) else frozenset(vars(self.modules[around])) & _keys(arguments[0])
        module, at, compared = root, around, kept
        for name in (None, *(each for each in path[len(around) :].split(".") if each)):
            if name is not None:
                at = f"{at}.{name}".lstrip(".")
                child = dict(module.named_children()).get(name)
                if child is None:
                    return f"the constructor of {type(root).__name__} makes no {at}"
                module, compared = child, frozenset[str]()
            other = _difference(module, self.modules[at], None if at == path else compared)
            if other is not None:
                return f"{other} of {at or 'the model'} is not that of its constructor"
        return module


def _paths_around(path: str) -> Iterator[str]:
    """Yield a path and those of the modules around it, outwards."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _constructed(module: nn.Module, dtype: torch.dtype) -> Sequence[tuple[nn.Module, RecordedConstructor]] | str:
    """Call the constructor of a module again, for every value of the flags that it does not keep; a reason if it cannot be called."""
    name, arguments = type(module).__name__, _kept_arguments(module)
    if isinstance(arguments, str):
        return arguments
    try:
        return [run_recorded(lambda each=each: type(module)(**copy.deepcopy(each)), dtype) for each in arguments]  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001  a constructor may raise anything; the error of the caller has this one in it
        return f"{name}(...) cannot be called again: {type(error).__name__}: {error}"


def _kept_arguments(module: nn.Module) -> list[dict[str, Any]] | str:
    """Return the arguments that a module was constructed with, by its attributes of these names, with every value of other flags."""
    attributes = own_attributes(module)
    known: dict[str, Any] = {}
    flags: list[str] = []
    for name, parameter in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        key = next((each for each in (name, f"_{name}") if each in attributes), None)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            return f"{type(module).__name__} takes *{name}"
        if key is not None:
            known[name] = attributes[key]
        elif isinstance(parameter.default, bool):
            flags.append(name)
        elif name not in ("device", "dtype") or parameter.default is not None:
            return f"{type(module).__name__} does not keep its argument {name!r} as an attribute"
    if len(flags) > _MOST_FLAGS:
        return f"{type(module).__name__} does not keep its arguments {', '.join(map(repr, flags))} as attributes"
    return [{**known, **dict(zip(flags, values, strict=True))} for values in itertools.product((True, False), repeat=len(flags))]


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def _difference(new: nn.Module, old: nn.Module, names: frozenset[str] | None) -> str | None:
    """Return the name of a plain attribute that differs between two modules, ``"the class"`` for other classes; None: they are alike.

    Args:
        names: of the attributes that are compared; None: all.
    """
    if type(new) is not type(old):
        return "the class"
    values, others = own_attributes(new), own_attributes(old)
    shared = [name for name in values if name in others and (names is None or name in names)]
    pairs = ((name, values[name], others[name]) for name in shared)
    return next((name for name, value, other in pairs if _is_plain(value) and _is_plain(other) and value != other), None)


def _keys(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the attributes that may keep these arguments."""
    return frozenset({*arguments, *(f"_{name}" for name in arguments)})


def _is_plain(value: Any) -> bool:
    return all(_is_plain(each) for each in value) if isinstance(value, tuple | list) else isinstance(value, _PLAIN)


def _leaf(module: nn.Module, key: str, index: int) -> Any:
    leaves = tree_leaves(vars(module).get(key))
    return leaves[index] if index < len(leaves) else None


_computed: WeakKeyDictionary[nn.Module, dict[int, tuple[Tensor, Tensor | str]]] = WeakKeyDictionary()
"""Model -> id of a tensor on the meta device among attributes -> this tensor, and its values or why they are not known.

Values are those of a constructor, so they do not change; every trace of a model has the same tensor.
"""


@contextlib.contextmanager
def attributes_as_cpu(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """While active, tensors on the meta device among attributes of modules are on the CPU, with the values that constructors compute.

    Yields:
        id of a tensor on the CPU without values -> the tensor on the meta device that it stands for, where the values are not known.
    """
    registered = {StorageWeakRef(each.untyped_storage()) for each in (*model.parameters(), *model.buffers())}
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in own_attributes(module).items()
        if any(_is_on_meta(leaf) for leaf in tree_leaves(value))
    ]
    known, unknown = _computed.setdefault(model, {}) if found else {}, dict[int, tuple[Tensor, Tensor]]()
    constructed = ConstructedTensors.of(model) if found else None

    def on_cpu(tensor: Tensor) -> Tensor:
        if constructed is None or not _is_on_meta(tensor) or StorageWeakRef(tensor.untyped_storage()) in registered:
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor, constructed.attribute(tensor)
        values = known[id(tensor)][1]
        if isinstance(values, Tensor):
            return values
        if id(tensor) not in unknown:
            unknown[id(tensor)] = tensor, torch.empty_like(tensor, device="cpu")
        return unknown[id(tensor)][1]

    try:
        for module, name, value in found:
            vars(module)[name] = tree_map_only(Tensor, on_cpu, value)
        yield {id(stand_in): tensor for tensor, stand_in in unknown.values()}
    finally:
        for module, name, value in found:
            vars(module)[name] = value


def _is_on_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta
