"""Give a partitioned model the modules of the model, with the parameters and buffers of this process, and the signature of its forward."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.module.structure import ModuleInPlan, Source, container_methods, new_part
from partitioner.runtime.state.gather import GatheredState
from partitioner.runtime.state.parameters import State
from partitioner.tracing.restore import Structure


class _Shards(dict[str, Any]):
    """The parameters of a module; a parameter with several parts on devices of one process comes once for each part.

    Args:
        parameters: key -> its first part, or None.
        others: key -> its other parts.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], others: Mapping[str, list[nn.Parameter]]) -> None:
        super().__init__(parameters)
        self._others = others

    def items(self) -> Any:
        """Return key and parameter of every part."""
        return [(key, part) for key, first in super().items() for part in (first, *self._others.get(key, ()))]


def build_structure(
    root: ModuleInPlan,
    model: nn.Module,
    state: State,
    gathered: GatheredState,
    structure: Structure,
    left: LeftAttributes,
    modes: Sequence[bool],
) -> None:
    """Give a module the structure of the model: modules of the same names, with the parameters and buffers of this process.

    Args:
        structure: of the model when it was partitioned.
        modes: the flag ``training`` of every module.
    """
    with structure.restored():
        _fill(root, model, state, gathered, structure, left)
    for each, is_training in zip(root.modules(), modes, strict=True):
        each.__dict__["training"] = is_training


def _fill(root: ModuleInPlan, model: nn.Module, state: State, gathered: GatheredState, structure: Structure, left: LeftAttributes) -> None:
    """Build the modules of the model in its present state, and register their tensors."""
    built: dict[nn.Module, ModuleInPlan] = {model: root}
    parameters = _by_name(state.named_parameters())
    buffers = dict(state.named_buffers())
    names = {id(tensor): state.first_name(name) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        part = built.setdefault(module, root if module is model else new_part(module))
        shards = {key: parameters.get(names[id(each)], []) for key, each in _own(module, "_parameters").items() if each is not None}
        firsts = {key: next(iter(shards.get(key, ())), None) for key in _own(module, "_parameters")}
        others = {key: parts[1:] for key, parts in shards.items() if len(parts) > 1}
        part.__dict__["_parameters"] = _Shards(firsts, others) if others else firsts
        own_buffers = part.__dict__["_buffers"]
        for key, buffer in _own(module, "_buffers").items():
            name = None if buffer is None else names[id(buffer)]
            own_buffers[key] = None if name is None else buffers.get(name)
            own_buffers.update({f"{key}{at[len(name) :]}": each for at, each in buffers.items() if name and at.startswith(f"{name}@")})
        further = {key for key in own_buffers if "@" in key}  # none of the model's: state_dict() has each buffer once
        part.__dict__["_non_persistent_buffers_set"] = {*module.__dict__["_non_persistent_buffers_set"], *further}
        for key, child in _own(module, "_modules").items():
            part.__dict__["_modules"][key] = None if child is None else built.setdefault(child, new_part(child))
        part.stand_for(Source(module, path, state, gathered, structure, left))


def _own(module: nn.Module, table: str) -> dict[str, Any]:
    """Return a table in which a module keeps its parameters, buffers or modules; there is no public way to see entries that are None."""
    own: dict[str, Any] = module.__dict__[table]
    return own


def _by_name(named: Iterator[tuple[str, nn.Parameter]]) -> dict[str, list[nn.Parameter]]:
    """Return name -> its parts, in order."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named:
        parts.setdefault(name, []).append(parameter)
    return parts


def with_signature(cls: type[nn.Module], model: nn.Module) -> type[nn.Module]:
    """Return a subclass whose ``forward`` does what that of ``cls`` does, with the signature of the model's ``forward``.

    Python looks up ``pm[0]`` and ``len(pm)``, too, in the class: it has these methods if the model is a container of torch.

    Readers of signatures (``transformers.Trainer`` removes columns of a data set by it) ask the instance or its class.
    """
    signature = inspect.signature(model.forward)
    bound_to = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    # A copy of the function, not a call of it: another frame would move the line that warnings name.
    original = cls.forward
    forward = types.FunctionType(original.__code__, original.__globals__, "forward", original.__defaults__, original.__closure__)
    forward.__doc__ = original.__doc__
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[bound_to, *(each for each in signature.parameters.values() if each.name != "self")]
    )
    methods = {"forward": forward, **container_methods(model)}
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "__doc__": cls.__doc__})
