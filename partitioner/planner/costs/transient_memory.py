"""Transient memory: values alive only while a stage computes, beside the activations saved between forward and backward.

    forward     a value is alive from the call that makes it to the last that reads it
    backward    its gradient is alive from the backward of its last reader to the backward of its maker
    weights     a gathered weight is whole from the use of the weight before it, when its gather starts, to the last call that reads it
    recompute   a value that was not saved is alive from the first backward that needs it to the last

Lifetimes follow from the order of the calls; the peak within each unit counts (``stage_problem.Working``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from partitioner.planner.costs.checkpoint_selection import CheckpointSelection
from partitioner.planner.solvers.stage_problem import Floats, Integers, Working
from passes.autograd.recompute import Recompute
from passes.emit.coalesce_collectives import ALONE_BYTES, BUNDLE_BYTES
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
        in_parts: bytes of the rank's shard of it, if it is gathered; else the same as ``size``.
        first, last: (V,) the first and last call that touches it.
        needed_first, needed_last: (V,) the first and last call whose backward needs it; as above if none does.
        is_passing: (V,) whether it is neither saved nor a weight.
        is_again: (V,) whether a backward recomputes it.
        is_gathered, is_gathered_back: (V,) whether it is a weight that is gathered for calls, and for backwards.
        has_gradient: (V,) whether the backward computes its gradient.
        is_returned: (V,) whether the model returns it.
    """

    size: tuple[Size, ...]
    in_parts: tuple[Size, ...]
    first: Integers
    last: Integers
    needed_first: Integers
    needed_last: Integers
    is_passing: Flags
    is_again: Flags
    is_gathered: Flags
    is_gathered_back: Flags
    has_gradient: Flags
    is_returned: Flags


class WorkingMemory:
    """Computes the transient memory of the units of a rank's shard of a model.

    Args:
        parameters: placeholders of parameters.
        given: the allocations of a training step's inputs, left out here: they are alive all the time.
        cost: of the shard; it says which allocations each call touches.
        units: the calls of each unit, all in order.
        keeping: the activations saved for the backward.
        policy: which others are recomputed.
    """

    def __init__(
        self,
        parameters: Iterable[str],
        given: Collection[int],
        cost: GraphCost,
        units: Sequence[Sequence[str]],
        keeping: CheckpointSelection,
        policy: Recompute,
    ) -> None:
        self._cost, self._policy = cost, policy

        def steps_of(name: str) -> list[tuple[str, list[int]]]:
            """Return (the call, the allocations touched) for each step of a call."""
            return [(name, [each for each in touched if each not in given]) for touched in cost.touched[name]]

        by_unit = [[step for name in unit for step in steps_of(name)] for unit in units]
        by_unit[-1] += steps_of("output")
        lengths = [len(steps) for steps in by_unit]
        self._n_steps = sum(lengths)
        self._starts = np.cumsum([0, *lengths])[:-1]  # (units,) the first step of each
        self._unit = np.repeat(np.arange(len(units)), lengths)  # (steps,) the unit of each
        self._values = _values_of(cost, [step for steps in by_unit for step in steps], keeping, frozenset(parameters))

    def at(self, numbers: Numbers, share: float, made: Floats, trained: Floats, *, alone: bool, called: bool) -> Working:
        """Return the transient memory of all units for one size of microbatches.

        Args:
            share: factor of the sizes of activations.
            made: (N,) bytes that each unit adds to the saved activations.
            trained: (N,) bytes of the gradients that are alive after the backward of each unit.
            alone: whether there is one microbatch; else weights for the next one are gathered while those of this one are used.
            called: whether programs call backwards as modules, instead of inlining them.
        """
        values, n_units = self._values, len(self._starts)
        sizes, given = (np.array([float(numbers[each]) for each in all_sizes]) for all_sizes in (values.size, values.in_parts))
        sizes = np.where(values.is_gathered, sizes, sizes * share)
        small = values.is_gathered & (given < ALONE_BYTES)
        forward = self._alive(sizes, values.is_passing, values.first, values.last)
        forward += self._gathered(sizes, values.is_gathered & ~small, back=False)
        forward[-1:] = np.maximum(forward[-1:], sizes @ (values.is_returned * (_HELD_BY_A_LOSS + values.is_passing)))
        backward = self._alive(sizes, values.has_gradient & ~values.is_returned, values.first, values.last) + trained[self._unit]
        again = np.zeros(n_units)
        if self._policy == "full":  # the whole stage is recomputed before its backward, and its gathered weights stay alive for that
            small, made_again = np.zeros_like(small), values.is_again | values.is_gathered_back
            np.add.at(again, self._unit[values.needed_first[made_again]], sizes[made_again])
        else:
            backward += self._gathered(sizes, values.is_gathered_back & ~small, back=True)
            backward += self._alive(sizes, values.is_again, values.needed_first, values.needed_last)
        bundled = np.bincount(self._unit[values.first[small]], sizes[small], n_units) * (1 if alone else _BUNDLES)
        at_once = _BUNDLES * BUNDLE_BYTES * float((sizes[small] / given[small]).max(initial=0.0))
        most = [np.rint(np.maximum.reduceat(each, self._starts)) for each in (forward, backward)]
        return Working(most[0], most[1], np.rint(made), np.rint(again), np.rint(trained), np.rint(bundled), at_once, called)

    def _alive(self, sizes: Floats, which: Flags, first: Integers, last: Integers) -> Floats:
        """Return (calls,) bytes alive at each call: an interval sweep over lifetimes ``first`` to ``last``."""
        made, dropped = (np.bincount(places[which], sizes[which], self._n_steps + 1) for places in (first, last + 1))
        alive: Floats = np.cumsum(made - dropped)[:-1]
        return alive

    def _gathered(self, sizes: Floats, which: Flags, *, back: bool) -> Floats:
        """Return (calls,) bytes of whole weights at each call: each is alive from the use of the weight before it (prefetch)."""
        places = np.flatnonzero(which)
        first, last = self._values.first.copy(), self._values.last.copy()
        if back:
            places = places[np.argsort(-last[places], kind="stable")]
            last[places[1:]] = last[places[:-1]]
        else:
            places = places[np.argsort(first[places], kind="stable")]
            first[places[1:]] = first[places[:-1]]
        return self._alive(sizes, which, first, last)


def _values_of(
    cost: GraphCost, order: Sequence[tuple[str, Sequence[int]]], keeping: CheckpointSelection, parameters: Collection[str]
) -> _Values:
    """Return the lifetimes of all allocations.

    Args:
        order: the calls in order, each with the allocations that it touches.
        keeping: the activations saved for the backward.
        parameters: placeholders of parameters; one that is computed from them and not saved is a gathered weight.
    """
    place = {name: number for number, (name, _) in enumerate(order)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, (_, touched) in enumerate(order):
        for allocation in touched:
            first.setdefault(allocation, number)
            last[allocation] = number
    for allocation in cost.returned & first.keys():
        last[allocation] = len(order) - 1
    found = tuple(first)
    needs = {each: [place[name] for name in keeping.needed[each] if name in place] for each in found if each in keeping.needed}
    is_weight = _flags(cost.maker[each] in parameters for each in found)
    is_kept, is_needed = _flags(each in keeping.savers for each in found), _flags(each in keeping.needed for each in found)
    is_gathered = is_weight & ~is_kept
    made_for = keeping.made_for(place)
    lasts = [(made_for.get(cost.maker[each], -1), *needs.get(each, ())) for each in found]
    values = _Values(
        size=tuple(cost.allocation_bytes[each] for each in found),
        in_parts=tuple(cost.allocation_bytes[cost.part_of.get(each, each)] for each in found),
        first=np.array([first[each] for each in found], np.int64),
        last=np.array([last[each] for each in found], np.int64),
        needed_first=np.array([min(needs.get(each, ()), default=first[each]) for each in found], np.int64),
        needed_last=np.array([last[each] if max(needed) < 0 else max(needed) for each, needed in zip(found, lasts, strict=True)], np.int64),
        is_passing=~is_kept & ~is_weight,
        is_again=is_needed & ~is_kept & ~is_weight,
        is_gathered=is_gathered,
        is_gathered_back=is_gathered & (is_needed | _flags(each in cost.gathered_again for each in found)),
        has_gradient=_flags(cost.maker[each] in cost.gradients for each in found),
        is_returned=_flags(each in cost.returned for each in found),
    )
    inside = {name: (place[name], max(place[name], made_for[name])) for name in sorted(keeping.again) if name in place}
    return _with_values_inside(values, {between: cost.nodes[name].keeps for name, between in inside.items()})


def _with_values_inside(values: _Values, sizes: Mapping[tuple[int, int], Size]) -> _Values:
    """Append the internal buffers that recomputed calls save for their own backward.

    Args:
        sizes: (the call, the last call whose backward needs its result) -> bytes.
    """
    found = {between: size for between, size in sizes.items() if size != 0}
    first, last = np.array(list(found), np.int64).reshape(-1, 2).T
    yes = np.ones(len(found), np.bool_)
    return _Values(
        size=(*values.size, *found.values()),
        in_parts=(*values.in_parts, *found.values()),
        first=np.append(values.first, first),
        last=np.append(values.last, first),
        needed_first=np.append(values.needed_first, first),
        needed_last=np.append(values.needed_last, last),
        is_passing=np.append(values.is_passing, ~yes),
        is_again=np.append(values.is_again, yes),
        is_gathered=np.append(values.is_gathered, ~yes),
        is_gathered_back=np.append(values.is_gathered_back, ~yes),
        has_gradient=np.append(values.has_gradient, ~yes),
        is_returned=np.append(values.is_returned, ~yes),
    )


def _flags(each: Iterable[bool]) -> Flags:
    return np.array(list(each), dtype=np.bool_)
