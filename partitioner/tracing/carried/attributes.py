"""Refuse a forward that reads what an earlier call left in an attribute: a graph has the values of the traced call.

    first trace:   steps = 0 -> 1     from the attributes as they are
    second trace:  steps = 1 -> 2     from those that the first call left: another graph? then forward reads them
    (watched)      steps < 10 ?       asked of a number that still changes: then a later call may compute otherwise

Attributes are numbers, texts, None, tensors, and lists, tuples and dicts of these, of all modules. Those that are only written
(attention weights to inspect, sizes to remember) stay allowed, and tensors that the first call makes of constants alone (tables of
positions). Buffers are no attributes here: writes to them are part of the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.tracing.carried.left_results import Contents, attribute_contents, edits_of_call, without_left
from partitioner.tracing.carried.same_computation import same_computation
from partitioner.tracing.carried.watched_values import is_watched_list, watched
from partitioner.tracing.restore import own_attributes, preserve
from passes.ir.errors import Place, TraceError
from passes.ir.graph import APPENDED, Edit, Result

Attributes = Mapping[str, object]
"""Path of an attribute, of an item in one, or of a length -> its value; of an object of another kind that is no function, its type."""

_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith("_forward_"))
_PLAIN = (bool, int, float, str, type(None), torch.SymInt, torch.SymFloat, Tensor)
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict)
_MOST = 10_000
"""Items of a container that are recorded; of a longer one its length alone."""


def attributes_of(model: nn.Module) -> Attributes:
    """Return the attributes of all modules, by path."""
    return _by_path(model, {module: own_attributes(module) for module in model.modules()})


def _by_path(model: nn.Module, attributes: Mapping[nn.Module, Mapping[str, object]]) -> Attributes:
    names = {module: path for path, module in model.named_modules()}
    found: dict[str, object] = {}
    for module, values in attributes.items():
        for name, value in values.items() if module in names else ():  # forward may replace modules
            _add(_path(names[module], name), value, found, frozenset())
    return found


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _add(path: str, value: Any, found: dict[str, object], around: frozenset[int]) -> None:
    """Add the plain values in an attribute by path, and the types of all others; ``around``: ids of the containers that it is in."""
    if isinstance(value, _PLAIN):
        found[path] = value
    elif type(value) in _CONTAINERS and id(value) not in around:
        items: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        found[f"len({path})"] = len(items)
        for key, item in items if len(items) <= _MOST else ():
            _add(f"{path}[{key!r}]", item, found, around | {id(value)})
    elif not callable(value):
        found[path] = type(value)


@dataclasses.dataclass
class Left:
    """Attributes left by the last call of a model.

    Attributes:
        attributes: module -> its attributes, containers copied.
        modules: module -> its children, which forward may have replaced.
        hooks: module -> its tables of hooks around forward, which forward may have registered.
        asked: paths of the watched values that it asked for.
        edits: what it left since the call began.
        n_results: how many of its results are in ``edits``: they come after those that the model returns.
    """

    attributes: dict[nn.Module, dict[str, Any]] = dataclasses.field(default_factory=dict)
    modules: dict[nn.Module, dict[str, nn.Module | None]] = dataclasses.field(default_factory=dict)
    hooks: dict[nn.Module, dict[str, dict[int, Any]]] = dataclasses.field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    edits: tuple[Edit, ...] = ()
    n_results: int = 0


@contextlib.contextmanager
def record_left(model: nn.Module, asking: set[str] | None = None) -> Iterator[Left]:
    """While active, record what each call of the model leaves, before ``torch.export`` restores it; yield that of the last one.

    A call that leaves tensors, or sizes, returns a pair of its result and the list of these.

    Args:
        asking: gets the paths of watched values while they are read.
    """
    left, asking = Left(), set() if asking is None else asking
    before: Contents = {}

    def begin(*_: object) -> None:
        nonlocal before
        before = attribute_contents(model)
        asking.clear()

    def record(_module: nn.Module, _args: object, result: Any) -> Any:
        left.asked = frozenset(asking)
        for module in model.modules():
            left.modules[module] = dict(vars(module)["_modules"])
            left.hooks[module] = {name: _without(vars(module)[name], own_hooks) for name in _HOOKS}
            own = own_attributes(module).items()
            left.attributes[module] = {name: _mapped(value, lambda _, leaf: leaf, "", frozenset()) for name, value in own}
        left.edits, results = edits_of_call(model, before)
        left.n_results = len(results)
        return (result, results) if results else None

    handles = model.register_forward_pre_hook(begin), model.register_forward_hook(record)
    own_hooks = {handle.id for handle in handles}
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()


def _without(hooks: Mapping[int, Any], left_out: set[int]) -> dict[int, Any]:
    return {number: hook for number, hook in hooks.items() if number not in left_out}


def _mapped(value: Any, change: Callable[[str, Any], Any], path: str, around: frozenset[int]) -> Any:
    """Return a copy of a value, with ``change(path, leaf)`` for each leaf, and ``change(path, list)`` for each list, in it."""
    kind = list if is_watched_list(value) else type(value)
    if kind not in _CONTAINERS or id(value) in around:
        return change(path, value)
    around |= {id(value)}
    if isinstance(value, dict):
        items = {key: _mapped(item, change, f"{path}[{key!r}]", around) for key, item in value.items()}
        return defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else kind(items)
    sequence = [_mapped(item, change, f"{path}[{index}]", around) for index, item in enumerate(value)]
    return change(path, sequence) if kind is list else tuple(sequence)


def refuse_carried_values(
    model: nn.Module,
    before: Attributes,
    left: Left,
    calls: Callable[[], Hashable | None],
    export: Callable[[Left], ExportedProgram],
) -> tuple[tuple[Edit, ...], tuple[str, ...]]:
    """Refuse a model of which a call reads what the call before it has left in attributes. It may change the attributes.

    Return the edits that every call makes, and the names of numbers that every call changes in a way that is not known.

    Args:
        before: the attributes before the traced call.
        left: what that call left.
        calls: runs the model from the attributes that it has, which it may change, and returns all that it calls; None if that cannot be
            told.
        export: traces the model from the attributes that it has, which it does not change, with fixed sizes, while a ``Left`` is recorded.

    Raises:
        CarriedValueError: naming the attributes.
    """
    if not _changed(before, _by_path(model, left.attributes)) or _calls_again(model, before, calls):
        return left.edits, ()
    with record_left(model) as first_left:
        first = export(first_left)
    without_left(first, first_left.n_results)
    after_first = _by_path(model, first_left.attributes)
    changed = _changed(before, after_first)
    asking, stand_ins = set[str](), list[Tensor]()
    _set(model, first_left, before, changed, asking, stand_ins)
    with record_left(model, asking) as second_left:
        try:
            second = export(second_left)
        except Exception as error:
            raise _error(model, changed) from error
    without_left(second, second_left.n_results)
    if not same_computation(first, second, stand_ins):
        raise _error(model, changed)
    still = _changed(after_first, _by_path(model, second_left.attributes))
    if read := [path for path in still if path in second_left.asked]:
        raise _error(model, read)
    return _made_again(left.edits, first_left.edits, second_left.edits, still, before)


def _made_again(
    edits: Sequence[Edit], first: Sequence[Edit], second: Sequence[Edit], still: Sequence[str], before: Attributes
) -> tuple[tuple[Edit, ...], tuple[str, ...]]:
    """Return the edits that later calls make as well, with equal values, or equal additions, where these are no tensors.

    Return also the names of numbers that later calls change otherwise.

    Args:
        edits: of the trace; ``first``: of one with fixed sizes, from the same attributes; ``second``: of the call after it.
        still: paths of values that the second call has changed.
        before: the attributes before the trace.
    """
    of_first, of_second = ({(edit.module, edit.path): edit for edit in each} for each in (first, second))

    def made(edit: Edit) -> Edit | None:
        one, two = of_first.get((edit.module, edit.path)), of_second.get((edit.module, edit.path))
        changes = any(path == edit.name or path.startswith((f"{edit.name}[", f"len({edit.name}")) for path in still)
        if one is None:
            return None
        if changes and edit.path[-1] is not APPENDED:
            after = [each.leaves[0] if each and len(each.leaves) == 1 else None for each in (one, two)]
            count = _count_before(before.get(edit.name), *after)
            return None if count is None else dataclasses.replace(edit, count_before=count)
        if two is None:
            return None if any(isinstance(leaf, Result) for leaf in one.leaves) else edit
        pairs = zip(one.leaves, two.leaves, strict=False)
        is_same = one.tree == two.tree and all(isinstance(old, Result) == isinstance(new, Result) for old, new in pairs)
        return edit if is_same else None

    found = [(edit, made(edit)) for edit in edits]
    lost = [edit.name for edit, kept in found if kept is None and edit.name in still]
    return tuple(kept for _, kept in found if kept is not None), tuple(lost)


def _count_before(*values: object) -> int | None:
    """Return the first of an attribute's values before, after one, and after two calls; None unless each call adds the same integer."""
    integers = [int(value) for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return integers[0] if len(integers) == 3 and integers[2] - integers[1] == integers[1] - integers[0] else None


def _calls_again(model: nn.Module, before: Attributes, calls: Callable[[], Hashable | None]) -> bool:
    """Return whether a second call computes as the first, and leaves what that left, so that all calls after it do, too.

    False does not say that they differ: only numbers and texts in attributes are compared so, which a trace costs more to tell.
    """
    with preserve(model):
        first, after_first = calls(), attributes_of(model)
        second, after_second = calls(), attributes_of(model)
    has_tensors = any(isinstance(value, Tensor) for path, value in after_second.items() if value is not before.get(path))
    return first is not None and first == second and not has_tensors and not _changed(after_first, after_second)


def _changed(before: Attributes, after: Attributes) -> list[str]:
    """Return the paths whose values a call has changed; replacing a tensor by a tensor is none."""

    def differs(old: object, new: object) -> bool:
        if isinstance(old, Tensor) or isinstance(new, Tensor):
            return not (isinstance(old, Tensor) and isinstance(new, Tensor))
        if isinstance(new, torch.SymInt | torch.SymFloat):
            return old is not new
        return isinstance(old, bool) != isinstance(new, bool) or bool(old != new)

    paths = dict.fromkeys((*before, *after))
    return [path for path in paths if path not in before or path not in after or differs(before[path], after[path])]


def _set(model: nn.Module, left: Left, before: Attributes, changed: Sequence[str], asking: set[str], stand_ins: list[Tensor]) -> None:
    """Set the attributes that a call left, with stand-ins of its tensors, and numbers and lists that note when they are asked for.

    Args:
        before: the attributes before that call.
        changed: the paths of those that it has changed.
        asking: gets the paths of changed numbers and lengths when they are asked for.
        stand_ins: gets the tensors that stand for those that the call computed.
    """
    names = {module: path for path, module in model.named_modules()}
    own = {id(value) for value in before.values() if isinstance(value, Tensor)}
    device = next((each.device for each in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    paths = set(changed)

    def change(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) not in own:
            old = before.get(path)
            if isinstance(old, Tensor):
                return old
            stand_ins.append(torch.zeros([int(size) for size in leaf.shape], dtype=leaf.dtype, device=device))
            return stand_ins[-1]
        key = f"len({path})" if isinstance(leaf, list) else path
        return watched(leaf, functools.partial(asking.add, key)) if key in paths else leaf

    for module, children in left.modules.items():
        if module in names and vars(module)["_modules"] != children:
            vars(module)["_modules"] = children
    for module, tables in left.hooks.items():
        for name, hooks in tables.items() if module in names else ():
            vars(module)[name].update(hooks)
    for module, values in left.attributes.items():
        for name, value in values.items() if module in names else ():
            path = _path(names[module], name)
            if any(each == path or each.startswith((f"{path}[", f"len({path}")) for each in paths):
                vars(module)[name] = _mapped(value, change, path, frozenset())


def refuse_read_tensors(model: nn.Module, before: Attributes, left: Left, program: ExportedProgram) -> None:
    """Raise CarriedValueError where a graph reads the tensors that were in attributes before forward assigned others.

    Args:
        before: the attributes before the trace.
        left: what the traced call left.
    """
    constants = {id(value) for value in program.constants.values() if isinstance(value, Tensor)}
    after = _by_path(model, left.attributes)
    assigned = [path for path, old in before.items() if isinstance(old, Tensor) and after.get(path) is not old]
    read = [path for path in assigned if id(before[path]) in constants]
    if read:
        raise _error(model, read)


class CarriedValueError(TraceError):
    """A call reads what the call before it has left in attributes. ``names``: of these attributes."""

    names: tuple[str, ...] = ()


def _error(model: nn.Module, paths: Sequence[str]) -> CarriedValueError:
    names = list(dict.fromkeys(path.removeprefix("len(").removesuffix(")").partition("[")[0] for path in paths))
    error = CarriedValueError(
        f"{type(model).__name__} changes {', '.join(names)} in its forward and computes with it in the next call, which a graph cannot",
        place=Place(module=names[0].rpartition(".")[0]),
        remedy='keep it in a buffer that forward writes: self.register_buffer("steps", torch.zeros(())), self.steps.add_(1)',
    )
    error.names = tuple(names)
    return error
