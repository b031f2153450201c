"""Lifetimes of the values of a training step, in the order of its calls.

A backward runs the calls in reverse, each in two phases, half steps of the order: those of call n are 2 n + 1, which comes first, and 2 n.
``transient_memory`` says what a phase computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cost_models.graph_cost import GraphCost
from partitioner.planner.costs.memory.checkpoint_selection import CheckpointSelection
from partitioner.planner.solvers.stage_memory import Integers
from passes.ir.tensor_spec import Size

Flags: TypeAlias = NDArray[np.bool_]
"""An array of truth values."""


class Values(NamedTuple):
    """The lifetimes of V allocations that calls touch.

    Attributes:
        size: bytes of each.
        shard_size: bytes of the rank's shard of it, if it is gathered; else the same as ``size``.
        sum_size: bytes of the copy of its gradient in the type in which ranks sum it; 0 if that is its own type.
        first, last: (V,) the first and last call that touches it.
        saved_first: (V,) the first call whose backward needs it, or a value that is made from it; -1: it is not saved.
        freed_in: (V,) the highest phase of a backward, by number, in which it is freed: that after the last that reads it; the first of a
            call, if it is read to recompute a value.
        needed_first: (V,) the smallest phase of a backward that needs it, the last in time.
        needed_last: (V,) the largest such phase, the first in time; as above if none does.
        is_passing: (V,) whether it is neither saved nor a weight.
        is_recomputed: (V,) whether a backward recomputes it.
        is_gathered, is_gathered_back: (V,) whether it is a weight that is gathered for calls, and for backwards.
        has_gradient: (V,) whether the backward computes its gradient.
        gradient_first, gradient_last: (V,) the last and first phase of a backward that has this, by number; the last is before the first if
            it is the gradient of another value, or a view of it (``_gradient_lifetimes``).
        is_weight: (V,) whether it is a parameter, or made from one.
        is_once: (V,) whether a step of several microbatches gathers it once.
        is_returned: (V,) whether the model returns it.
        in_loss: (V,) copies of it that a loss function holds, if so.
    """

    size: tuple[Size, ...]
    shard_size: tuple[Size, ...]
    sum_size: tuple[Size, ...]
    first: Integers
    last: Integers
    saved_first: Integers
    freed_in: Integers
    needed_first: Integers
    needed_last: Integers
    is_passing: Flags
    is_recomputed: Flags
    is_gathered: Flags
    is_gathered_back: Flags
    has_gradient: Flags
    gradient_first: Integers
    gradient_last: Integers
    is_weight: Flags
    is_once: Flags
    is_returned: Flags
    in_loss: Integers


class Saving(NamedTuple):
    """``CheckpointSelection.needed`` and ``savers``: allocation -> calls."""

    needed: Mapping[int, Collection[str]]
    savers: Mapping[int, Collection[str]]


Order: TypeAlias = Sequence[tuple[str, Sequence[int]]]
"""Calls in order, each with the allocations that it touches."""


def lifetimes(
    cost: GraphCost,
    order: Order,
    selection: CheckpointSelection,
    saving: Saving,
    parameters: Collection[str],
    casts: Mapping[str, float],
) -> Values:
    """Return the lifetimes of all allocations.

    Args:
        order: the calls in order, each with the allocations that it touches.
        selection: the activations saved for the backward.
        saving: its saved values, or these with weights that stages share taken apart.
        casts: as ``transient_memory.WorkingMemory`` has it.
        parameters: placeholders of parameters; one that is computed from them and not saved is a gathered weight.
    """
    position = {name: number for number, (name, _) in enumerate(order)}
    first, last, callers = _touches(cost, order)
    all_allocations, last_need = tuple(first), selection.last_need(position)
    needs = _needs(cost, position, saving, callers)
    savers = {each: [position[name] for name in saving.savers.get(each, ()) if name in position] for each in all_allocations}
    saved_first = {each: min(calls, default=-1) for each, calls in savers.items()}

    def needed_last(allocation: int) -> int:
        """Return the first phase in time of a backward that needs a value, itself or to recompute another."""
        recomputing = (last_need.get(name, -1) for name in callers[allocation])
        latest = max(*(2 * call + 1 for call in recomputing), *needs[allocation], -1)
        return latest if latest >= 0 else 2 * last[allocation] + 1

    def freed_in(allocation: int) -> int:
        """Return the phase in which a saved value is freed."""
        again = (last_need.get(name, -1) for name in callers[allocation] if name != cost.maker[allocation])
        phases = [*(phase - 1 for phase in needs[allocation]), *(2 * call + 1 for call in again if call >= 0)]
        return max(min(phases, default=-1), 2 * saved_first[allocation] - 1)

    gathered = cost.gathered | cost.gathered_once
    weights = {each for each in all_allocations if cost.maker[each] in parameters or each in gathered}
    is_weight = _flags(each in weights for each in all_allocations)
    is_kept = _flags(bool(saving.savers.get(each)) for each in all_allocations)
    is_needed = _flags(bool(saving.needed.get(each)) for each in all_allocations)
    is_gathered = is_weight & ~is_kept
    gradient_first, gradient_last = _gradient_lifetimes(cost, position, first, last, callers, weights)
    widths = {each: casts[cost.maker[each]] for each in all_allocations if each in cost.part_of and cost.maker[each] in casts}
    values = Values(
        size=tuple(cost.allocation_bytes[each] for each in all_allocations),
        shard_size=tuple(cost.allocation_bytes[cost.part_of.get(each, each)] for each in all_allocations),
        sum_size=tuple(cost.allocation_bytes[each] * widths.get(each, 0) for each in all_allocations),
        first=np.array([first[each] for each in all_allocations], np.int64),
        last=np.array([last[each] for each in all_allocations], np.int64),
        saved_first=np.array([saved_first[each] for each in all_allocations], np.int64),
        freed_in=np.array([freed_in(each) for each in all_allocations], np.int64),
        needed_first=np.array([min(needs[each], default=2 * first[each] + 1) for each in all_allocations], np.int64),
        needed_last=np.array([needed_last(each) for each in all_allocations], np.int64),
        is_passing=~is_kept & ~is_weight,
        is_recomputed=is_needed & ~is_kept & ~is_weight,
        is_gathered=is_gathered,
        is_gathered_back=is_gathered & (is_needed | _flags(each in cost.gathered_again for each in all_allocations)),
        has_gradient=_flags(cost.maker[each] in cost.gradients for each in all_allocations),
        gradient_first=np.array([gradient_first[each] for each in all_allocations], np.int64),
        gradient_last=np.array([gradient_last[each] for each in all_allocations], np.int64),
        is_weight=is_weight,
        is_once=_flags(each in cost.gathered_once for each in all_allocations),
        is_returned=_flags(each in cost.returned for each in all_allocations),
        in_loss=np.array([cost.returned.get(each, 0) for each in all_allocations], np.int64),
    )
    activations = {each: call for each, call in first.items() if each not in weights}
    sums = _sums_of_gradients(cost, position, activations, callers)
    return _with_more(values, [*_buffers_of(cost, position, selection, last_need), *sums])


def _needs(cost: GraphCost, position: Mapping[str, int], saving: Saving, callers: Mapping[int, Collection[str]]) -> dict[int, list[int]]:
    """Return allocation -> the phases of backwards that read it."""
    read_second = {(each, name) for name, operands in cost.differentiated.items() for each in operands[0]}
    needed = {each: saving.needed.get(each, ()) or cost.gathered_again.get(each, ()) for each in callers}
    calls = {each: [name for name in names if name in position] for each, names in needed.items()}
    return {each: [2 * position[name] + ((each, name) not in read_second) for name in names] for each, names in calls.items()}


def _touches(cost: GraphCost, order: Order) -> tuple[dict[int, int], dict[int, int], dict[int, set[str]]]:
    """Return allocation -> the first call that touches it, the last, which of results is the end of the model, and the names of all."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    callers: dict[int, set[str]] = {}
    for number, (name, touched) in enumerate(order):
        for allocation in touched:
            first.setdefault(allocation, number)
            last[allocation] = number
            callers.setdefault(allocation, set()).add(name)
    for allocation in cost.returned.keys() & first.keys():
        last[allocation] = len(order) - 1
    return first, last, callers


class _Inner(NamedTuple):
    """An allocation that no other call touches.

    Attributes:
        call: the number of the call.
        size: bytes.
        last_use: the last call whose backward needs it, if the backward makes it; else -1.
        phases: the smallest and the largest phase of a backward in which it exists, if it is a gradient.
    """

    call: int
    size: Size
    last_use: int = -1
    phases: tuple[int, int] | None = None


def _buffers_of(cost: GraphCost, position: Mapping[str, int], selection: CheckpointSelection, last_need: Mapping[str, int]) -> list[_Inner]:
    """Return the internal buffers of calls."""
    found: list[_Inner] = []
    for name, call in position.items():
        if name in cost.nodes:
            last_use = max(call, last_need[name]) if name in selection.recomputed else -1
            found += [_Inner(call, cost.nodes[name].keeps, last_use), _Inner(call, cost.nodes[name].working, call)]
    return [each for each in found if each.size != 0]


def _sums_of_gradients(
    cost: GraphCost, position: Mapping[str, int], activations: Mapping[int, int], callers: Mapping[int, Collection[str]]
) -> list[_Inner]:
    """Return the gradients that are added to those of later readers, and the sums, beside the gradients of ``_gradient_lifetimes``.

    q, k, v = x Wq, x Wk, x Wv        first phase     second phase
    backward of v                     v'
    of k                              v', k'          v', k', v' + k'
    of q                              v' + k', q'     v' + k', q', the sum of all

    Args:
        activations: allocation -> the first call that touches it.
    """
    found: list[_Inner] = []
    for each, start in activations.items():
        maker, size = cost.maker[each], cost.allocation_bytes[each]
        readers = [name for name in callers[each] if name != maker and name in cost.nodes and cost.nodes[name].backward_input.launches]
        if maker not in cost.gradients or each in cost.returned or len(readers) < 2:
            continue
        *others, last = sorted(readers, key=position.__getitem__)
        is_added = size not in cost.nodes[last].passed
        for name in reversed(others):
            call = position[name]
            if size not in cost.nodes[name].passed:
                found += [_Inner(start, size, phases=(2 * call, 2 * call + is_added)), _Inner(start, size, phases=(2 * call, 2 * call))]
            is_added = True
    return found


def _gradient_lifetimes(
    cost: GraphCost,
    position: Mapping[str, int],
    first: Mapping[int, int],
    last: Mapping[int, int],
    callers: Mapping[int, Collection[str]],
    weights: Collection[int],
) -> tuple[dict[int, int], dict[int, int]]:
    """Return allocation -> the smallest and the largest phase of a backward, which has them in falling order, in which its gradient exists.

    A sum passes its gradient on to its operands, and a concatenation views of it (``OperationCost.passed``). If such a call is the last
    that reads a value, the gradient of its result stays until another reader's is added to it, or until the value is computed:

        s = x + f(x)        gradients, last call first:   of s   s, f      (of f(x): that of s)
        y = g(s)                                          of x   x, f      (from f's backward on, where both are added)

    A call with a kernel for each gradient computes those after the first in its second phase, and reads that of its result until then. The
    gradient of a weight, which goes to a sum, is made by the backward of its first reader.

    Args:
        position: of the calls.
        first, last: allocation -> the first and last call that touches it.
        callers: allocation -> the calls that touch it.
        weights: allocations of parameters, or made from them.
    """
    results: dict[str, int] = {}  # call -> the allocation that it makes
    for each, maker in cost.maker.items():
        if each not in cost.part_of:
            results.setdefault(maker, each)
    after = {(each, name) for name, operands in cost.differentiated.items() for operand in operands[1:] for each in operand}
    earliest = {each: 2 * call + (cost.maker[each] not in cost.differentiated) for each, call in first.items()}
    latest = {each: 2 * call + 1 for each, call in last.items()}
    for each in sorted(first, key=first.__getitem__):
        if each in weights:
            reader = min((name for name in callers[each] if name != cost.maker[each]), key=position.__getitem__, default="")
            earliest[each] = 2 * first[each] + ((each, reader) not in after)
        readers = [name for name in callers[each] if name != cost.maker[each] and name in cost.nodes and cost.nodes[name].forward.launches]
        if not readers or each in cost.returned:
            continue
        *others, reader = sorted(readers, key=position.__getitem__)
        result = results.get(reader, -1)
        if cost.allocation_bytes[each] not in cost.nodes[reader].passed or result not in first:
            latest[each] -= (each, reader) in after
            continue
        latest[each] = 2 * position[others[-1]] + 1 if others else -1
        earliest[result] = min(earliest[result], latest[each] if others else earliest[each])
    return earliest, latest


def _with_more(values: Values, more: Sequence[_Inner]) -> Values:
    """Append allocations that one call makes for itself."""
    calls, last = (np.array(each, np.int64) for each in ([each.call for each in more], [each.last_use for each in more]))
    phases = np.array([each.phases or (2 * each.call + 1, 2 * each.call + 1) for each in more], np.int64).reshape(-1, 2)
    is_gradient = _flags(each.phases is not None for each in more)
    sizes, is_recomputed = tuple(each.size for each in more), last >= 0
    no = np.zeros(len(more), np.bool_)
    return Values(
        size=(*values.size, *sizes),
        shard_size=(*values.shard_size, *sizes),
        sum_size=(*values.sum_size, *(0 for _ in sizes)),
        first=np.append(values.first, calls),
        last=np.append(values.last, calls),
        saved_first=np.append(values.saved_first, np.where(is_recomputed | is_gradient, -1, calls)),
        freed_in=np.append(values.freed_in, np.where(is_recomputed | is_gradient, -1, 2 * calls)),
        needed_first=np.append(values.needed_first, 2 * calls + 1),
        needed_last=np.append(values.needed_last, 2 * np.maximum(calls, last) + 1),
        is_passing=np.append(values.is_passing, no),
        is_recomputed=np.append(values.is_recomputed, is_recomputed),
        is_gathered=np.append(values.is_gathered, no),
        is_gathered_back=np.append(values.is_gathered_back, no),
        has_gradient=np.append(values.has_gradient, is_gradient),
        gradient_first=np.append(values.gradient_first, phases[:, 0]),
        gradient_last=np.append(values.gradient_last, phases[:, 1]),
        is_weight=np.append(values.is_weight, no),
        is_once=np.append(values.is_once, no),
        is_returned=np.append(values.is_returned, no),
        in_loss=np.append(values.in_loss, np.zeros(len(more), np.int64)),
    )


def _flags(flags: Iterable[bool]) -> Flags:
    return np.array(list(flags), dtype=np.bool_)
