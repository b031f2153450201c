"""Compare modules: modules of one class, with attributes of equal values, have one form.

    blocks.0   Block(heads=96, window=None), weights of (36864, 12288) ...      alike
    blocks.1   Block(heads=96, window=None), weights of (36864, 12288) ...      alike
    blocks.2   Block(heads=96, window=256), weights of (36864, 12288) ...       another form

Weights are compared by size and type, everything else by value; objects that hold something and do not compare by value are equal to
themselves alone.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.tracing.inputs.ties import first_names
from partitioner.tracing.repeated.unread_attributes import Attribute, recordable
from passes.ir.torch_private import DisableTorchFunction

LEAST_COPIES = 3
"""The fewest copies that are worth finding: one of them is traced in any case."""

_REGISTERED = ("_parameters", "_buffers", "_modules")

_BASES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types compared by ``==``; floats and complex numbers are compared by ``repr``, so that NaN equals NaN and 0.0 differs from -0.0."""

_VALUES = frozenset(_BASES)


class Forms:
    """Number the forms of modules: modules of equal class, attribute values, and tensor layouts have equal numbers.

    Args:
        unread: attributes whose values are not compared; None: no values are.
    """

    def __init__(self, unread: Collection[Attribute] | None = ()) -> None:
        self._unread = unread
        self._numbers: dict[Hashable, int] = {}

    def number(self, module: nn.Module, known: dict[nn.Module, int] | None = None) -> int:
        """Return the number of a module's form in its current state.

        Args:
            known: numbers of modules in this state; receives those of the module and of all modules in it.
        """
        known = {} if known is None else known
        if module not in known:
            known[module] = self._number(module, known)
        return known[module]

    def _number(self, module: nn.Module, known: dict[nn.Module, int]) -> int:
        attributes = {name: self._value(module, name) for name in vars(module) if name not in _REGISTERED}
        own_tensors = {**module._parameters, **module._buffers}  # noqa: SLF001  in contrast to named_parameters(), these include None
        tensors = [(name, None if tensor is None else layout_of(tensor)) for name, tensor in own_tensors.items()]
        children = [(name, None if child is None else self.number(child, known)) for name, child in module._modules.items()]  # noqa: SLF001
        form = type(module), comparison_key(attributes, identity_key), tuple(tensors), tuple(children)
        return self._numbers.setdefault(form, len(self._numbers))

    def _value(self, module: nn.Module, name: str) -> Any:
        is_unread = self._unread is None or (type(module), name) in self._unread
        return None if is_unread else vars(module)[name]


def alike_modules(model: nn.Module, forms: Forms) -> dict[str, nn.Module]:
    """Return path -> module of the outermost modules whose form occurs ``LEAST_COPIES`` times or more, in the order of the model.

    Left out are modules without children, lists and dicts of modules (nothing calls them), and modules that contain a tied tensor or a
    shared submodule.
    """
    tied = [(name, first) for name, first in first_names(model).items() if name != first]  # two names of one tensor
    shared = {*itertools.chain(*tied), *_paths_of_shared_modules(model)}
    known: dict[nn.Module, int] = {}
    numbers = {path: forms.number(module, known) for path, module in model.named_modules() if path and any(module.children())}
    counts = Counter(numbers.values())
    alike: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if path not in numbers or counts[numbers[path]] < LEAST_COPIES or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        is_nested = any(path.startswith(f"{outer}.") for outer in alike)
        if not is_nested and not any(name == path or name.startswith(f"{path}.") for name in shared):
            alike[path] = module
    return alike


def differing_attributes(model: nn.Module) -> set[Attribute]:
    """Return the attributes whose values are the only difference of modules, as far as their reads can be recorded."""
    by_form: defaultdict[int, list[nn.Module]] = defaultdict(list)
    forms = Forms(unread=None)
    for module in alike_modules(model, forms).values():
        by_form[forms.number(module)].append(module)
    differing: set[Attribute] = set()
    for first, *others in by_form.values():
        for other in others:
            for one, another in zip(first.modules(), other.modules(), strict=True):
                differing |= {(type(one), name) for name in vars(one) if name not in _REGISTERED and not _is_equal(one, another, name)}
    return {(kind, name) for kind, name in differing if recordable(kind, name)}


def _is_equal(one: nn.Module, another: nn.Module, name: str) -> bool:
    return comparison_key(vars(one)[name], identity_key) == comparison_key(vars(another)[name], identity_key)


def comparison_key(value: Any, key_of_object: Callable[[Any], Hashable]) -> Hashable:
    """Return a key that is equal for equal values; containers are compared item by item.

    Args:
        key_of_object: gives the key of a tensor, and of an object that does not compare by value.
    """
    kind = type(value)
    if kind in _VALUES:
        return kind, value
    if isinstance(value, Tensor):
        return key_of_object(value)
    if isinstance(value, (tuple, list)):
        return kind, tuple([comparison_key(part, key_of_object) for part in value])
    if isinstance(value, (dict, Mapping)):  # to ask for dicts first takes a tenth of the time
        return kind, tuple([(comparison_key(key, key_of_object), comparison_key(part, key_of_object)) for key, part in value.items()])
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset([comparison_key(part, key_of_object) for part in value])
    if isinstance(value, _BASES):
        return kind, value
    if isinstance(value, slice):
        return slice, comparison_key((value.start, value.stop, value.step), key_of_object)
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return kind, str(value.dtype), value.shape, value.tobytes()
    if type(value) is functools.partial:
        return functools.partial, comparison_key((value.func, value.args, value.keywords), key_of_object)
    return ("stateless", type(value)) if _is_stateless(value) else key_of_object(value)


class _Stateless:
    """Of the size of instances that hold nothing beside their ``__dict__``."""


def _is_stateless(value: object) -> bool:
    """Return whether an object holds nothing, no attributes, slots or parts written in C, so that all of its class do the same."""
    kind = type(value)
    return kind.__basicsize__ == _Stateless.__basicsize__ and kind.__itemsize__ == 0 and getattr(value, "__dict__", None) == {}


def layout_of(tensor: Tensor) -> Hashable:
    """Return all properties of a tensor that tracing can depend on."""
    with DisableTorchFunction():  # modes of functions would be asked for each
        strides = tensor.stride() if tensor.layout == torch.strided else None
        return type(tensor), tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def attribute_snapshot(module: nn.Module) -> list[Hashable]:
    """Return a key of all attributes of a module and its submodules, which changes when an attribute is replaced."""
    return [comparison_key(vars(submodule), identity_key) for submodule in module.modules()]


def identity_key(value: Any) -> Hashable:
    """Return the key of an object that equals itself alone."""
    return "object", id(value)


def _paths_of_shared_modules(model: nn.Module) -> set[str]:
    """Return every path of each module that has more than one path."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    return {path for same_module in paths.values() if len(same_module) > 1 for path in same_module}
