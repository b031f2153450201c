"""Which modules of a model are copies of each other: of one class, with attributes of equal values.

    blocks.0   Block(heads=96, window=None), weights of (36864, 12288) ...      alike
    blocks.1   Block(heads=96, window=None), weights of (36864, 12288) ...      alike
    blocks.2   Block(heads=96, window=256), weights of (36864, 12288) ...       another form

Weights count by their sizes and types, everything else by its value; objects that have no value of their own are equal to themselves alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.tracing.ties import first_names

__all__ = ["LEAST_COPIES", "Forms", "alike_modules", "contents_of", "described", "layout_of"]

LEAST_COPIES = 3
"""Modules that must be alike for it to be worth looking closer: one of them is traced in any case."""

_REGISTERED = ("_parameters", "_buffers", "_modules")

_VALUES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types whose objects are their values; numbers with a point are told apart by their digits."""


class Forms:
    """Numbers for modules: equal for those that are alike."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, module: nn.Module) -> int:
        """The form of a module as it is now."""
        own = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
        tensors = [(name, None if tensor is None else layout_of(tensor)) for name, tensor in _tensors(module).items()]
        children = [(name, None if child is None else self.number(child)) for name, child in module._modules.items()]  # noqa: SLF001
        form = type(module), described(own, _itself), tuple(tensors), tuple(children)
        return self._numbers.setdefault(form, len(self._numbers))


def alike_modules(model: nn.Module, forms: Forms) -> dict[str, nn.Module]:
    """Path -> module, of the outermost modules that have copies, in the order of the model.

    Modules that share a tensor, or a module of theirs, with anything else are none of them.
    """
    first = first_names(model)
    shared = {name for pair in first.items() if pair[0] != pair[1] for name in pair}
    shared |= _several_names(model)
    numbers = {name: forms.number(module) for name, module in model.named_modules() if name and any(module.children())}
    counts = Counter(numbers.values())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name not in numbers or counts[numbers[name]] < LEAST_COPIES or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and not any(each == name or each.startswith(f"{name}.") for each in shared):
            found[name] = module
    return found


def described(value: Any, of_object: Callable[[Any], Hashable]) -> Hashable:
    """What a value is, to be compared.

    Args:
        of_object: what is said of a tensor, and of an object that has no value of its own.
    """
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(described(part, of_object) for part in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(described(part, of_object) for part in value)
    if isinstance(value, Mapping):
        return type(value), tuple((described(key, of_object), described(part, of_object)) for key, part in value.items())
    if isinstance(value, slice):
        return slice, described((value.start, value.stop, value.step), of_object)
    return of_object(value)


def layout_of(tensor: Tensor) -> Hashable:
    """All that tracing may see of a tensor that is given."""
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def contents_of(module: nn.Module) -> list[Hashable]:
    """All that modules hold, to see whether anything of it changes."""
    return [described(vars(each), _itself) for each in module.modules()]


def _itself(value: Any) -> Hashable:
    return "object", id(value)


def _tensors(module: nn.Module) -> dict[str, Tensor | None]:
    return {**module._parameters, **module._buffers}  # noqa: SLF001  in order, those that are None among them


def _several_names(model: nn.Module) -> set[str]:
    """The names of modules that have more than one."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}
