"""Transient memory: values alive only while a stage computes, beside the activations saved between forward and backward.

    forward     a value is alive from the call that makes it to the last that reads it
    backward    its gradient is alive from the backward of its last reader to the backward of its maker
    saved       a saved value is freed after the last backward that reads it, itself or to recompute another value
    weights     a gathered weight is whole from the use of the weight before it, when its gather starts, to the last call that reads it
    recompute   a value that was not saved is alive from the first backward that needs it to the last; a gathered weight, from the
                first recomputation that reads it

Lifetimes follow from the order of the calls; the result is the peak within each unit (``stage_problem.TransientMemory``). The backward of a
call has two phases, half steps of the order of calls. The first computes all gradients, or that of the first operand if each has a kernel
of its own (``GraphCost.differentiated``); the second the others:

    y = linear(x, w)    dw = mm(dy', x) and its cast to float32    frees x
                        dx = mm(dy, w)                             frees dy, and w if it was gathered
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from partitioner.planner.costs.memory.checkpoint_selection import CheckpointSelection
from partitioner.planner.solvers.stage_problem import Floats, Integers, TransientMemory
from passes.emit.coalesce_collectives import ALONE_BYTES, bytes_of_bundle
from passes.emit.overlap_collectives import MOST_UNDER_WAY
from passes.ir.tensor_spec import Size

__all__ = ["Gradient", "WorkingMemory"]

_BUNDLES = 2
"""Coalesced gathers of weights alive at once: one is read while the next is gathered."""

_PHASES = 2
"""Of the backward of a call."""

Flags = NDArray[np.bool_]


class _Values(NamedTuple):
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
        needed_last: (V,) the last call whose backward needs it; as above if none does.
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


class Gradient(NamedTuple):
    """The gradient of a parameter.

    Attributes:
        unit: whose backward computes it first.
        readers: the calls that read the parameter.
        size: bytes.
    """

    unit: int
    readers: tuple[str, ...]
    size: float


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
        self._order = [step for steps in by_unit for step in steps]
        self._selection, self._parameters, self._casts = selection, frozenset(parameters), casts
        self._last_step = {name: number for number, (name, _) in enumerate(self._order)}
        self._of_stages: dict[int, _Values] = {}

    def at(
        self,
        numbers: Numbers,
        share: float,
        saved: Floats,
        gradients: Sequence[Gradient],
        weights: Floats,
        *,
        alone: bool,
        n_stages: int = 1,
    ) -> TransientMemory:
        """Return the transient memory of all units for one size of microbatches.

        Args:
            share: factor of the sizes of activations.
            saved: (N,) bytes that each unit adds to the saved activations.
            gradients: of the parameters.
            weights: (N,) bytes that each unit holds between the two halves of a backward.
            alone: whether there is one microbatch; else weights for the next one are gathered while those of this one are used.
            n_stages: number of stages; each gathers a weight that it shares with others, and scatters its gradient, for itself.
        """
        values, n_units = self._values(n_stages), len(self._starts)
        of_values = (values.size, values.shard_size, values.sum_size)
        sizes, shard_sizes, sum_sizes = (np.array([float(numbers[size]) for size in each]) for each in of_values)
        sizes = np.where(values.is_gathered, sizes, sizes * share)
        small = values.is_gathered & (shard_sizes < ALONE_BYTES)
        forward = self._alive(sizes, values.is_passing, values.first, values.last, 1)
        forward += self._gathered_alive(values, sizes, values.is_gathered & ~small, back=False)
        forward[-1:] = np.maximum(forward[-1:], sizes @ (values.in_loss + values.is_returned * values.is_passing))
        is_shared = sizes > shard_sizes
        of_inputs, of_weights = self._backward(values, sizes, sum_sizes, small, is_shared, is_shared & (alone | ~values.is_once))
        computed, held = self._gradients_alive(gradients, n_units)
        backward = of_inputs + of_weights + computed - self._freed(values, sizes, alone=alone)
        coalesced = np.bincount(self._unit[values.first[small]], sizes[small], n_units) * (1 if alone else _BUNDLES)
        n_ranks = round(float((sizes[small] / shard_sizes[small]).max(initial=0.0)))
        at_once = float(_BUNDLES * n_ranks * bytes_of_bundle(n_ranks)) if n_ranks else 0.0
        phases = 2 * self._starts
        return TransientMemory(
            np.rint(np.maximum.reduceat(forward, self._starts)),
            np.rint(np.maximum.reduceat(backward, phases)),
            np.rint(np.maximum.reduceat(of_inputs, phases)),
            np.rint(saved),
            np.rint(held),
            np.rint(coalesced),
            at_once,
            np.rint(weights),
        )

    def _values(self, n_stages: int) -> _Values:
        """Return the lifetimes of all allocations, with weights that units of different stages use taken apart."""
        if n_stages not in self._of_stages:
            longest = len(self._starts) / n_stages
            taken = _uses_apart(self._cost, self._order, self._selection, self._unit, longest) if n_stages > 1 else None
            cost, order, saving = taken or (self._cost, self._order, _Saving(self._selection.needed, self._selection.savers))
            self._of_stages[n_stages] = _values_of(cost, order, self._selection, saving, self._parameters, self._casts)
        return self._of_stages[n_stages]

    def _backward(
        self, values: _Values, sizes: Floats, sum_sizes: Floats, small: Flags, is_shared: Flags, is_sent: Flags
    ) -> tuple[Floats, Floats]:
        """Return (2 x calls,) bytes in each phase of a backward: of all but gradients of weights, and of these on their way to a sum.

        The phases of call n are 2 n + 1, which comes first, and 2 n. ``is_shared``: (V,) whether ranks store shards of the value,
        ``is_sent``: whether its gradient is scattered during the backward.
        """
        is_value = values.has_gradient & ~values.is_returned & ~values.is_weight & (values.gradient_first <= values.gradient_last)
        is_summed = values.has_gradient & values.is_weight & (is_shared | (sum_sizes > 0))
        of_inputs = self._alive(sizes, is_value, values.gradient_first, values.gradient_last)
        of_inputs += self._gathered_alive(values, sizes, values.is_gathered_back & ~small, back=True)
        of_inputs += self._alive(sizes, values.is_recomputed, values.needed_first, 2 * values.needed_last + 1)
        made, last = values.gradient_first, np.maximum(values.gradient_last, values.gradient_first)
        of_weights = self._alive(sizes, is_summed, made, last) + self._alive(sum_sizes, is_summed, made, made)
        return of_inputs, of_weights + self._sent_alive(made, np.where(sum_sizes > 0, sum_sizes, sizes), is_summed & is_sent)

    def _sent_alive(self, first: Integers, sizes: Floats, mask: Flags) -> Floats:
        """Return (2 x calls,) bytes of gradients, made in phases ``first``, on their way: until as many others left as may be under way."""
        sent = np.flatnonzero(mask)
        sent = sent[np.argsort(-first[sent], kind="stable")]
        until = first.copy()
        until[sent[:-MOST_UNDER_WAY]] = first[sent[MOST_UNDER_WAY:]]
        return self._alive(sizes, mask, until, first - 1)

    def _gradients_alive(self, gradients: Sequence[Gradient], n_units: int) -> tuple[Floats, Floats]:
        """Return (2 x calls,) bytes of the gradients that the unit of each phase has computed by then, and (N,) those of each unit."""
        ends = 2 * np.append(self._starts[1:], self._n_steps) - 1
        unit, size = np.array([each.unit for each in gradients], np.int64), np.array([each.size for each in gradients])
        steps = [max((self._last_step.get(name, self._n_steps) for name in each.readers), default=self._n_steps) for each in gradients]
        last = np.minimum(2 * np.array(steps, np.int64) + 1, ends[unit])
        held = np.zeros(n_units)
        np.add.at(held, unit, size)
        return self._alive(size, np.ones(len(size), np.bool_), 2 * self._starts[unit], last), held

    def _freed(self, values: _Values, sizes: Floats, *, alone: bool) -> Floats:
        """Return (2 x calls,) bytes of the saved values that a backward has freed by each phase, but whose unit it has not left yet."""
        mask = (values.saved_first >= 0) & (alone | ~values.is_once)
        start = 2 * self._starts[self._unit[values.saved_first]]
        return self._alive(sizes, mask, start, values.freed_in)

    def _alive(self, sizes: Floats, mask: Flags, first: Integers, last: Integers, phases: int = _PHASES) -> Floats:
        """Return (``phases`` x calls,) bytes of the masked allocations alive in each: a sweep over lifetimes ``first`` to ``last``."""
        n_places = phases * self._n_steps
        allocated = np.bincount(first[mask], sizes[mask], n_places + 1)
        freed = np.bincount(last[mask] + 1, sizes[mask], n_places + 1)
        alive: Floats = np.cumsum(allocated - freed, dtype=float)[:-1]  # counts of no allocations are integers
        return alive

    def _gathered_alive(self, values: _Values, sizes: Floats, mask: Flags, *, back: bool) -> Floats:
        """Return (calls,) bytes of gathered weights at each call: each is alive from the use of the weight before it (prefetch).

        In the backward (``back``), (2 x calls,) for its phases, calls run in reverse, so that a weight is alive until the use of the one
        after it.
        """
        weights = np.flatnonzero(mask)
        first, last = values.first.copy(), (values.needed_last if back else values.last).copy()
        if back:
            weights = weights[np.argsort(-last[weights], kind="stable")]
            last[weights[1:]] = last[weights[:-1]]
            return self._alive(sizes, mask, values.needed_first, 2 * last + 1)
        weights = weights[np.argsort(first[weights], kind="stable")]
        first[weights[1:]] = first[weights[:-1]]
        return self._alive(sizes, mask, first, last, 1)


class _Saving(NamedTuple):
    """``CheckpointSelection.needed`` and ``savers``: allocation -> calls."""

    needed: Mapping[int, Collection[str]]
    savers: Mapping[int, Collection[str]]


_Order = Sequence[tuple[str, Sequence[int]]]
"""Calls in order, each with the allocations that it touches."""


def _uses_apart(
    cost: GraphCost, order: _Order, selection: CheckpointSelection, unit: Integers, longest: float
) -> tuple[GraphCost, _Order, _Saving] | None:
    """Return the costs, order and saved values with an allocation for each stage of a gathered weight's uses; None if no weight has two.

    Uses with more than ``longest`` units between them, the length of a stage, are in different stages:

        embedding(ids, w) ... linear(x, w)    ->    embedding(ids, w) ... linear(x, w2)

    Args:
        unit: (steps,) the unit of each step of the order.
    """
    weights = {each for each in cost.part_of if each in cost.gathered or each in cost.gathered_once}
    last, number, sources = dict[int, int](), dict[int, int](), dict[int, int]()
    renamed, calls = list[tuple[str, Sequence[int]]](), dict[int, set[str]]()
    following = max(cost.allocation_bytes, default=0) + 1
    for step, (name, touched) in enumerate(order):
        for each in weights.intersection(touched):
            if unit[step] - unit[last.get(each, step)] > longest:
                number[each] = following + len(sources)
                sources[number[each]] = each
            last[each] = step
            calls.setdefault(number.get(each, each), set()).add(name)
        renamed.append((name, [number.get(each, each) for each in touched]))
    if not sources:
        return None

    def with_copies(of: Mapping[int, Any]) -> dict[int, Any]:
        return {**of, **{copy: of[each] for copy, each in sources.items() if each in of}}

    def of_calls(of: Mapping[int, Collection[str]]) -> dict[int, Collection[str]]:
        split = {*sources, *sources.values()}
        return {each: calls[each].intersection(names) if each in split else names for each, names in with_copies(of).items()}

    def also(of: frozenset[int]) -> frozenset[int]:
        return of | {copy for copy, each in sources.items() if each in of}

    own = {(sources[copy], name): copy for copy, names in calls.items() if copy in sources for name in names}
    differentiated = {
        name: tuple(tuple(own.get((each, name), each) for each in operand) for operand in operands)
        for name, operands in cost.differentiated.items()
    }
    apart = replace(
        cost,
        allocation_bytes=with_copies(cost.allocation_bytes),
        maker=with_copies(cost.maker),
        part_of=with_copies(cost.part_of),
        differentiated=differentiated,
        gathered=also(cost.gathered),
        gathered_again=also(cost.gathered_again),
        gathered_once=also(cost.gathered_once),
    )
    return apart, renamed, _Saving(of_calls(selection.needed), of_calls(selection.savers))


def _values_of(
    cost: GraphCost,
    order: _Order,
    selection: CheckpointSelection,
    saving: _Saving,
    parameters: Collection[str],
    casts: Mapping[str, float],
) -> _Values:
    """Return the lifetimes of all allocations.

    Args:
        order: the calls in order, each with the allocations that it touches.
        selection: the activations saved for the backward.
        saving: of it.
        casts: as ``WorkingMemory`` has it.
        parameters: placeholders of parameters; one that is computed from them and not saved is a gathered weight.
    """
    position = {name: number for number, (name, _) in enumerate(order)}
    first, last, callers = _touches(cost, order)

    def first_of(names: Collection[str]) -> int:
        return min((position[name] for name in names if name in position), default=-1)

    all_allocations, last_need, needed_last = tuple(first), selection.last_need(position), list[int]()
    read_second = {(each, name) for name, operands in cost.differentiated.items() for each in operands[0]}
    needs: dict[int, list[int]] = {}  # allocation -> the phases of backwards that need it
    for each in all_allocations:
        needs[each] = [2 * position[name] + ((each, name) not in read_second) for name in saving.needed.get(each, ()) if name in position]
        is_parameter = cost.maker[each] in parameters or each in cost.gathered
        recomputing = (last_need.get(name, -1) for name in callers[each])
        latest = max(*recomputing, *(phase // 2 for phase in needs[each]), last[each] if is_parameter else -1)
        needed_last.append(latest if latest >= 0 else last[each])

    def freed_in(allocation: int) -> int:
        """Return the phase in which a saved value is freed."""
        again = (last_need.get(name, -1) for name in callers[allocation] if name != cost.maker[allocation])
        phases = [*(phase - 1 for phase in needs[allocation]), *(2 * call + 1 for call in again if call >= 0)]
        return max(min(phases, default=-1), 2 * first_of(saving.savers.get(allocation, ())) - 1)

    weights = {each for each in all_allocations if cost.maker[each] in parameters or each in cost.gathered}
    is_weight = _flags(each in weights for each in all_allocations)
    is_kept = _flags(bool(saving.savers.get(each)) for each in all_allocations)
    is_needed = _flags(bool(saving.needed.get(each)) for each in all_allocations)
    is_gathered = is_weight & ~is_kept
    gradient_first, gradient_last = _gradient_lifetimes(cost, position, first, last, callers, weights)
    widths = {each: casts[cost.maker[each]] for each in all_allocations if each in cost.part_of and cost.maker[each] in casts}
    values = _Values(
        size=tuple(cost.allocation_bytes[each] for each in all_allocations),
        shard_size=tuple(cost.allocation_bytes[cost.part_of.get(each, each)] for each in all_allocations),
        sum_size=tuple(cost.allocation_bytes[each] * widths.get(each, 0) for each in all_allocations),
        first=np.array([first[each] for each in all_allocations], np.int64),
        last=np.array([last[each] for each in all_allocations], np.int64),
        saved_first=np.array([first_of(saving.savers.get(each, ())) for each in all_allocations], np.int64),
        freed_in=np.array([freed_in(each) for each in all_allocations], np.int64),
        needed_first=np.array([min(needs[each], default=2 * first[each] + 1) for each in all_allocations], np.int64),
        needed_last=np.array(needed_last, np.int64),
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


def _touches(cost: GraphCost, order: _Order) -> tuple[dict[int, int], dict[int, int], dict[int, set[str]]]:
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


def _with_more(values: _Values, more: Sequence[_Inner]) -> _Values:
    """Append allocations that one call makes for itself."""
    calls, last = (np.array(each, np.int64) for each in ([each.call for each in more], [each.last_use for each in more]))
    phases = np.array([each.phases or (2 * each.call + 1, 2 * each.call + 1) for each in more], np.int64).reshape(-1, 2)
    is_gradient = _flags(each.phases is not None for each in more)
    sizes, is_recomputed = tuple(each.size for each in more), last >= 0
    no = np.zeros(len(more), np.bool_)
    return _Values(
        size=(*values.size, *sizes),
        shard_size=(*values.shard_size, *sizes),
        sum_size=(*values.sum_size, *(0 for _ in sizes)),
        first=np.append(values.first, calls),
        last=np.append(values.last, calls),
        saved_first=np.append(values.saved_first, np.where(is_recomputed | is_gradient, -1, calls)),
        freed_in=np.append(values.freed_in, np.where(is_recomputed | is_gradient, -1, 2 * calls)),
        needed_first=np.append(values.needed_first, 2 * calls + 1),
        needed_last=np.append(values.needed_last, np.maximum(calls, last)),
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
