"""Transient memory: values alive only while a stage computes, beside the activations saved between forward and backward.

    forward     a value is alive from the call that makes it to the last that reads it
    backward    its gradient is alive from the backward of its last reader to the backward of its maker
    weights     a gathered weight is whole from the use of the weight before it, when its gather starts, to the last call that reads it
    recompute   a value that was not saved is alive from the first backward that needs it to the last; a gathered weight, from the
                first recomputation that reads it

Lifetimes follow from the order of the calls; the result is the peak within each unit (``stage_problem.TransientMemory``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from partitioner.planner.costs.memory.checkpoint_selection import CheckpointSelection
from partitioner.planner.solvers.stage_problem import Floats, Integers, TransientMemory
from passes.emit.coalesce_collectives import ALONE_BYTES, bytes_of_bundle
from passes.ir.tensor_spec import Size

__all__ = ["WorkingMemory"]

_HELD_BY_A_LOSS = 1
"""Transient bytes of a loss function, which is not in the graph, in units of the model's results."""

_BUNDLES = 2
"""Coalesced gathers of weights alive at once: one is read while the next is gathered."""

Flags = NDArray[np.bool_]


class _Values(NamedTuple):
    """The lifetimes of V allocations that calls touch.

    Attributes:
        size: bytes of each.
        shard_size: bytes of the rank's shard of it, if it is gathered; else the same as ``size``.
        sum_size: bytes of the copy of its gradient in the type in which ranks sum it; 0 if that is its own type.
        first, last: (V,) the first and last call that touches it.
        needed_first, needed_last: (V,) the first and last call whose backward needs it; as above if none does.
        is_passing: (V,) whether it is neither saved nor a weight.
        is_recomputed: (V,) whether a backward recomputes it.
        is_gathered, is_gathered_back: (V,) whether it is a weight that is gathered for calls, and for backwards.
        has_gradient: (V,) whether the backward computes its gradient.
        is_returned: (V,) whether the model returns it.
    """

    size: tuple[Size, ...]
    shard_size: tuple[Size, ...]
    sum_size: tuple[Size, ...]
    first: Integers
    last: Integers
    needed_first: Integers
    needed_last: Integers
    is_passing: Flags
    is_recomputed: Flags
    is_gathered: Flags
    is_gathered_back: Flags
    has_gradient: Flags
    is_returned: Flags


class WorkingMemory:
    """Computes the transient memory of the units of a rank's shard of a model.

    Args:
        parameters: placeholders of parameters.
        casts: gathered cast of a parameter -> the bytes of an element of the parameter in those of the cast.
        given: the allocations of a training step's inputs, left out here: they are alive all the time.
        cost: of the shard; it says which allocations each call touches.
        units: the calls of each unit, all in order.
        selection: the activations saved for the backward, and those recomputed.
    """

    def __init__(
        self,
        parameters: Iterable[str],
        casts: Mapping[str, float],
        given: Collection[int],
        cost: GraphCost,
        units: Sequence[Sequence[str]],
        selection: CheckpointSelection,
    ) -> None:
        self._cost = cost

        def steps_of(name: str) -> list[tuple[str, list[int]]]:
            """Return (the call, the allocations touched) for each step of a call."""
            return [(name, [allocation for allocation in touched if allocation not in given]) for touched in cost.touched[name]]

        by_unit = [[step for name in unit for step in steps_of(name)] for unit in units]
        by_unit[-1] += steps_of("output")
        lengths = [len(steps) for steps in by_unit]
        self._n_steps = sum(lengths)
        self._starts = np.cumsum([0, *lengths])[:-1]  # (units,) the first step of each
        self._unit = np.repeat(np.arange(len(units)), lengths)  # (steps,) the unit of each
        self._values = _values_of(cost, [step for steps in by_unit for step in steps], selection, frozenset(parameters), casts)

    def at(self, numbers: Numbers, share: float, saved: Floats, gradients: Floats, deferred: Floats, *, alone: bool) -> TransientMemory:
        """Return the transient memory of all units for one size of microbatches.

        Args:
            share: factor of the sizes of activations.
            saved: (N,) bytes that each unit adds to the saved activations.
            gradients: (N,) bytes of the gradients that are alive after the backward of each unit.
            deferred: (N,) bytes beyond ``saved`` that each unit holds between the two halves of a backward.
            alone: whether there is one microbatch; else weights for the next one are gathered while those of this one are used.
        """
        values, n_units = self._values, len(self._starts)
        of_values = (values.size, values.shard_size, values.sum_size)
        sizes, shard_sizes, sum_sizes = (np.array([float(numbers[size]) for size in each]) for each in of_values)
        sizes = np.where(values.is_gathered, sizes, sizes * share)
        small = values.is_gathered & (shard_sizes < ALONE_BYTES)
        forward = self._alive(sizes, values.is_passing, values.first, values.last)
        forward += self._gathered_alive(sizes, values.is_gathered & ~small, back=False)
        forward[-1:] = np.maximum(forward[-1:], sizes @ (values.is_returned * (_HELD_BY_A_LOSS + values.is_passing)))
        backward = gradients[self._unit] + self._alive(
            sizes + sum_sizes, values.has_gradient & ~values.is_returned, values.first, values.last
        )
        backward += self._gathered_alive(sizes, values.is_gathered_back & ~small, back=True)
        backward += self._alive(sizes, values.is_recomputed, values.needed_first, values.needed_last)
        coalesced = np.bincount(self._unit[values.first[small]], sizes[small], n_units) * (1 if alone else _BUNDLES)
        n_ranks = round(float((sizes[small] / shard_sizes[small]).max(initial=0.0)))
        at_once = float(_BUNDLES * n_ranks * bytes_of_bundle(n_ranks)) if n_ranks else 0.0
        peaks = [np.rint(np.maximum.reduceat(alive, self._starts)) for alive in (forward, backward)]
        of_units = (peaks[0], peaks[1], np.rint(saved), np.rint(gradients), np.rint(coalesced))
        return TransientMemory(*of_units, at_once, np.rint(deferred))

    def _alive(self, sizes: Floats, mask: Flags, first: Integers, last: Integers) -> Floats:
        """Return (calls,) bytes of the masked allocations that are alive at each call: a sweep over lifetimes ``first`` to ``last``."""
        allocated = np.bincount(first[mask], sizes[mask], self._n_steps + 1)
        freed = np.bincount(last[mask] + 1, sizes[mask], self._n_steps + 1)
        alive: Floats = np.cumsum(allocated - freed)[:-1]
        return alive

    def _gathered_alive(self, sizes: Floats, mask: Flags, *, back: bool) -> Floats:
        """Return (calls,) bytes of gathered weights at each call: each is alive from the use of the weight before it (prefetch).

        In the backward (``back``) calls run in reverse, so that a weight is alive until the use of the one after it.
        """
        weights = np.flatnonzero(mask)
        first, last = self._values.first.copy(), (self._values.needed_last if back else self._values.last).copy()
        if back:
            weights = weights[np.argsort(-last[weights], kind="stable")]
            last[weights[1:]] = last[weights[:-1]]
        else:
            weights = weights[np.argsort(first[weights], kind="stable")]
            first[weights[1:]] = first[weights[:-1]]
        return self._alive(sizes, mask, first, last)


def _values_of(
    cost: GraphCost,
    order: Sequence[tuple[str, Sequence[int]]],
    selection: CheckpointSelection,
    parameters: Collection[str],
    casts: Mapping[str, float],
) -> _Values:
    """Return the lifetimes of all allocations.

    Args:
        order: the calls in order, each with the allocations that it touches.
        selection: the activations saved for the backward.
        casts: as ``WorkingMemory`` has it.
        parameters: placeholders of parameters; one that is computed from them and not saved is a gathered weight.
    """
    position = {name: number for number, (name, _) in enumerate(order)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    callers: dict[int, set[str]] = {}
    for number, (name, touched) in enumerate(order):
        for allocation in touched:
            first.setdefault(allocation, number)
            last[allocation] = number
            callers.setdefault(allocation, set()).add(name)
    for allocation in cost.returned & first.keys():
        last[allocation] = len(order) - 1
    all_allocations, last_need, needed_last = tuple(first), selection.last_need(position), list[int]()
    needs: dict[int, list[int]] = {}  # allocation -> the calls whose backward needs it
    for each in all_allocations:
        needs[each] = [position[name] for name in selection.needed.get(each, ()) if name in position]
        recomputing = max(last_need.get(name, -1) for name in callers[each])
        latest = max(recomputing, *needs[each], last[each] if cost.maker[each] in parameters or each in cost.gathered else -1)
        needed_last.append(latest if latest >= 0 else last[each])
    is_weight = _flags(cost.maker[each] in parameters or each in cost.gathered for each in all_allocations)
    is_kept = _flags(each in selection.savers for each in all_allocations)
    is_needed = _flags(each in selection.needed for each in all_allocations)
    is_gathered = is_weight & ~is_kept
    widths = {each: casts[cost.maker[each]] for each in all_allocations if each in cost.part_of and cost.maker[each] in casts}
    values = _Values(
        size=tuple(cost.allocation_bytes[each] for each in all_allocations),
        shard_size=tuple(cost.allocation_bytes[cost.part_of.get(each, each)] for each in all_allocations),
        sum_size=tuple(cost.allocation_bytes[each] * widths.get(each, 0) for each in all_allocations),
        first=np.array([first[each] for each in all_allocations], np.int64),
        last=np.array([last[each] for each in all_allocations], np.int64),
        needed_first=np.array([min(needs[each], default=first[each]) for each in all_allocations], np.int64),
        needed_last=np.array(needed_last, np.int64),
        is_passing=~is_kept & ~is_weight,
        is_recomputed=is_needed & ~is_kept & ~is_weight,
        is_gathered=is_gathered,
        is_gathered_back=is_gathered & (is_needed | _flags(each in cost.gathered_again for each in all_allocations)),
        has_gradient=_flags(cost.maker[each] in cost.gradients for each in all_allocations),
        is_returned=_flags(each in cost.returned for each in all_allocations),
    )
    recomputed = [name for name in sorted(selection.recomputed) if name in position]
    buffers = {(position[name], max(position[name], last_need[name])): cost.nodes[name].keeps for name in recomputed}
    return _with_internal_buffers(values, buffers)


def _with_internal_buffers(values: _Values, buffers: Mapping[tuple[int, int], Size]) -> _Values:
    """Append the internal buffers of recomputed calls: (the call, the last call whose backward needs its result) -> bytes."""
    sizes = {lifetime: size for lifetime, size in buffers.items() if size != 0}
    first, last = np.array(list(sizes), np.int64).reshape(-1, 2).T
    yes = np.ones(len(sizes), np.bool_)
    return _Values(
        size=(*values.size, *sizes.values()),
        shard_size=(*values.shard_size, *sizes.values()),
        sum_size=(*values.sum_size, *(0 for _ in sizes)),
        first=np.append(values.first, first),
        last=np.append(values.last, first),
        needed_first=np.append(values.needed_first, first),
        needed_last=np.append(values.needed_last, last),
        is_passing=np.append(values.is_passing, ~yes),
        is_recomputed=np.append(values.is_recomputed, yes),
        is_gathered=np.append(values.is_gathered, ~yes),
        is_gathered_back=np.append(values.is_gathered_back, ~yes),
        has_gradient=np.append(values.has_gradient, ~yes),
        is_returned=np.append(values.is_returned, ~yes),
    )


def _flags(flags: Iterable[bool]) -> Flags:
    return np.array(list(flags), dtype=np.bool_)
