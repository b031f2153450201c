"""Which modules of a model are copies of each other: of one class, with attributes of equal values.

    blocks.0   Block(heads=96, window=None), weights of (36864, 12288) ...      alike
    blocks.1   Block(heads=96, window=None), weights of (36864, 12288) ...      alike
    blocks.2   Block(heads=96, window=256), weights of (36864, 12288) ...       another form

Weights count by their sizes and types, everything else by its value; objects that have no value of their own are equal to themselves alone.

Run a model once on shapes alone, to see which of its modules do the very same: those are traced once.

    model(tokens)                              log of the model                     logs of the blocks
      x = embedding(tokens)                    embedding(tokens)
      x = blocks.0(x)                          blocks.0(embedding's result)         norm, linear, ... of input 0, own weights
      x = blocks.1(x)                          blocks.1(result of blocks.0)         norm, linear, ... of input 0, own weights
      norm(x)                                  norm(result of blocks.1)

Every call of PyTorch is logged, with its arguments: numbers by value, tensors by where they come from. Modules of one form whose logs
are equal are copies. Then the model runs a second time, stand-ins in the place of all copies but one: if whatever is outside of them
does the same again, nothing that the copies do besides returning their results is noticed by anybody.

A log tells what Python did, not what it might have done at other sizes; that, too, is the same for modules of equal code and equal
attributes (``alike_modules``), unless they ask something that is neither an attribute nor an argument, which the logs would show.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from partitioner.tracing.inputs.ties import first_names
from partitioner.tracing.restore import preserved
from passes.ir.torch_private import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "LEAST_COPIES",
    "Copies",
    "Forms",
    "StandIn",
    "alike_modules",
    "contents_of",
    "described",
    "intercepted",
    "layout_of",
    "rehearse",
]


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


# -- run a model once on shapes alone, to see which of its modules do the very same ------------------------------------------------


Handler: TypeAlias = Callable[..., Any]
"""Called in the place of a module's ``forward``: with the module's path, ``forward``, and its arguments."""


@dataclass(frozen=True)
class StandIn:
    """What a module gives, without computing it.

    Attributes:
        leaves: for each leaf of its result: ``("input", k)``, the leaf of its arguments; ``("like", k)``, a new tensor like it; or
            ``("value", v)``, no tensor.
        tree: the structure of the result.
    """

    leaves: tuple[tuple[str, Any], ...]
    tree: TreeSpec

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        """The leaves of the result, from those of the arguments."""
        return [self._leaf(how, what, given) for how, what in self.leaves]

    def _leaf(self, how: str, what: Any, given: Sequence[Any]) -> Any:
        if how == "value":
            return what
        return given[what] if how == "input" else torch.clone(given[what], memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Copies:
    """Modules that do the very same.

    Attributes:
        template: path of the one that is traced.
        others: paths of those that are written as it is.
        result: what all of them give.
    """

    template: str
    others: tuple[str, ...]
    result: StandIn


@contextlib.contextmanager
def intercepted(modules: Mapping[str, nn.Module], handler: Handler) -> Iterator[None]:
    """While it lasts, calls of modules go to a handler."""

    def instead(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: handler(path, forward, *args, **kwargs)

    for path, module in modules.items():
        module.forward = instead(path, module.forward)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


def rehearse(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Copies, ...]:
    """The copies among a model's modules; none where that cannot be told for sure."""
    forms = Forms()
    modules = alike_modules(model, forms)
    if len(modules) < LEAST_COPIES or any("forward" in vars(module) for module in modules.values()):
        return ()
    try:
        first = _run(model, args, kwargs, modules, forms, {})
        copies = _copies(first)
        if not copies:
            return ()
        stand_ins = {path: each.result for each in copies for path in each.others}
        again = _run(model, args, kwargs, modules, forms, stand_ins)
    except Exception:  # noqa: BLE001  a model that needs values, or refuses to be run so, is traced as it is
        return ()
    logs = [(call.path, call.log) for call in first.calls if call.path not in stand_ins]
    is_same = again.outside.entries == first.outside.entries and logs == [(call.path, call.log) for call in again.calls]
    return copies if is_same and not again.outside.is_unclear else ()


# -- what is seen of a run ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Log:
    """Calls of PyTorch, in order.

    Attributes:
        entries: each call with what it was given and what came of it.
        roles: tensors, by identity -> where they come from.
        is_unclear: whether a tensor was read that comes from nowhere.
    """

    entries: list[Hashable] = field(default_factory=list)
    roles: dict[int, Hashable] = field(default_factory=dict)
    is_unclear: bool = False

    def role(self, value: Any) -> Hashable:
        """Where a tensor comes from; an object is itself."""
        if not isinstance(value, Tensor):
            return value if callable(value) and isinstance(value, Hashable) else ("object", id(value))
        self.is_unclear |= id(value) not in self.roles
        return self.roles.get(id(value))

    def name(self, result: Any) -> Hashable:
        """Give the new tensors of a result roles; returns what is to be compared of it."""
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self.roles.setdefault(id(leaf), (len(self.entries), position))
        return described(result, self._seen)

    def _seen(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self.role(value), layout_of(value)
        return str(type(value))


@dataclass(frozen=True)
class _Call:
    """One call of a module.

    Attributes:
        path: of the module.
        log: what it did.
        key: equal for calls that do the same; None for one that no other can be like.
        result: what stands in for it.
    """

    path: str
    log: tuple[Hashable, ...]
    key: Hashable
    result: StandIn | None


class _Watch(TorchFunctionMode):
    """Logs every call of PyTorch, in the log of the module that it is made in."""

    def __init__(self, modules: Mapping[str, nn.Module], forms: Forms, stand_ins: Mapping[str, StandIn]) -> None:
        super().__init__()
        self.outside = _Log()
        self.calls: list[_Call] = []
        self._log: _Log | None = self.outside
        self._modules = {path: (module, forms.number(module)) for path, module in modules.items()}
        self._stand_ins = stand_ins
        self._alive: list[Any] = []  # identities tell tensors apart while they live

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        log = self._log
        if log is None:
            return func(*args, **(kwargs or {}))
        given = described((args, kwargs or {}), log.role)
        result = func(*args, **(kwargs or {}))
        self._alive.append(result)
        log.entries.append((func, given, _modes(), log.name(result)))
        return result

    def call(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module that may have copies is called."""
        if self._log is not self.outside:
            return forward(*args, **kwargs)
        self._log = None
        given, tree = tree_flatten((args, kwargs))
        stand_in = self._stand_ins.get(path)
        result = self._watched(path, forward, args, kwargs) if stand_in is None else tree_unflatten(stand_in(given), stand_in.tree)
        self._alive.append((given, result))
        entry = path, str(tree), described(given, self.outside.role)
        self.outside.entries.append((*entry, self.outside.name(result)))
        self._log = self.outside
        return result

    def _watched(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module with a log of its own."""
        (module, form), (given, tree) = self._modules[path], tree_flatten((args, kwargs))
        log, before = _Log(), contents_of(module)
        for place, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                log.roles.setdefault(id(leaf), ("input", place))
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            log.roles[id(tensor)] = "state", name
        modes, seen = _modes(), tuple(layout_of(leaf) if isinstance(leaf, Tensor) else described(leaf, id) for leaf in given)
        self._log = log
        result = forward(*args, **kwargs)
        self._log = None
        is_changed = contents_of(module) != before or [*map(id, tree_leaves((args, kwargs)))] != [*map(id, given)]
        leaves, result_tree = tree_flatten(result)
        stand_in = _stand_in(given, leaves, result_tree)
        key = None
        if stand_in is not None and not is_changed and not log.is_unclear and all(map(_has_value, given)):
            results = tuple(log.role(leaf) if isinstance(leaf, Tensor) else described(leaf, id) for leaf in leaves)
            key = form, str(tree), seen, modes, tuple(log.entries), str(result_tree), results
        self.calls.append(_Call(path, tuple(log.entries), key, stand_in))
        return result


def _run(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    forms: Forms,
    stand_ins: Mapping[str, StandIn],
) -> _Watch:
    """Run a model on shapes alone.

    Args:
        modules: by path, those whose calls are looked at.
        stand_ins: path of a module -> what is done in its place.
    """
    args, kwargs = tree_map_only(Tensor, _without_memory, (tuple(args), dict(kwargs)))
    state = dict((*model.named_parameters(), *model.named_buffers()))
    replaced = {name: _without_memory(tensor) for name, tensor in state.items() if tensor.device.type != "meta"}
    watch = _Watch(modules, forms, stand_ins)
    for name, tensor in (*enumerate(tree_leaves((args, kwargs))), *state.items(), *replaced.items()):
        watch.outside.roles[id(tensor)] = "given", name
    with preserved(model), intercepted(modules, watch.call), watch:
        result = torch.func.functional_call(model, replaced, args, dict(kwargs)) if replaced else model(*args, **kwargs)
    watch.outside.entries.append(watch.outside.name(result))
    return watch


def _without_memory(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        return tensor
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)


def _modes() -> Hashable:
    """What else decides what a call of PyTorch does."""
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast


# -- what follows from it ----------------------------------------------------------------------------------------------------------------


def _copies(run: _Watch) -> tuple[Copies, ...]:
    """The modules that are called once and do what others do."""
    alike: defaultdict[Hashable, list[_Call]] = defaultdict(list)
    for call in run.calls:
        if call.key is not None and sum(other.path == call.path for other in run.calls) == 1:
            alike[call.key].append(call)
    found = []
    for template, *others in alike.values():
        if len(others) + 1 >= LEAST_COPIES and template.result is not None:
            found.append(Copies(template.path, tuple(each.path for each in others), template.result))
    return tuple(found)


def _stand_in(given: Sequence[Any], leaves: Sequence[Any], tree: TreeSpec) -> StandIn | None:
    """What gives tensors like these without computing them; None where there is nothing so simple."""
    memory = [_memory(leaf) for leaf in given if isinstance(leaf, Tensor)]
    found: list[tuple[str, Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if not _has_value(leaf):
                return None
            found.append(("value", leaf))
            continue
        place = next((place for place, other in enumerate(given) if other is leaf), None)
        if place is not None:
            found.append(("input", place))
            continue
        like = next((place for place, other in enumerate(given) if isinstance(other, Tensor) and _is_like(other, leaf)), None)
        if like is None or _memory(leaf) in memory:
            return None
        memory.append(_memory(leaf))
        found.append(("like", like))
    return StandIn(tuple(found), tree)


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _is_like(given: Tensor, result: Tensor) -> bool:
    """Whether a dense copy of one tensor lies in memory as another does."""
    whole = result.untyped_storage().nbytes() == result.numel() * result.element_size()
    kinds = [(each.shape, each.dtype, each.device, each.requires_grad) for each in (given, result)]
    return kinds[0] == kinds[1] and whole and result.is_contiguous() and given.is_floating_point()


def _has_value(leaf: Any) -> bool:
    """Whether two calls that are given equal leaves are given the same."""
    objects: list[Any] = []
    described(leaf, objects.append)
    return isinstance(leaf, Tensor) or not objects
