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
from typing import NamedTuple

import numpy as np

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import GraphCost
from partitioner.planner.costs.memory.checkpoint_selection import CheckpointSelection
from partitioner.planner.costs.memory.lifetimes import Flags, Saving, Values, lifetimes
from partitioner.planner.costs.memory.shared_weights import uses_apart
from partitioner.planner.solvers.stage_memory import Floats, GradientMessages, Integers, RecomputedValues, TransientMemory
from passes.emit.coalesce_collectives import ALONE_BYTES, BUNDLE_BYTES, bytes_of_bundle
from passes.emit.overlap_collectives import MOST_UNDER_WAY

_BUNDLES = 2
"""Coalesced gathers of weights alive at once: one is read while the next is gathered."""

_PHASES = 2
"""Of the backward of a call."""


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
        self._of_stages: dict[int, Values] = {}

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
        is_each = np.ones(len(sizes), np.bool_) if alone or not self._cost.scattered_once else ~values.is_once
        of_inputs, of_weights = self._backward(values, sizes, sum_sizes, small, is_shared, is_each)
        computed, held = self._gradients_alive(gradients, n_units)
        unsent = of_inputs + of_weights + computed - self._freed(values, sizes, is_shared, alone=alone)
        message_sizes = np.where(sum_sizes > 0, sum_sizes, sizes)
        is_sent = values.has_gradient & values.is_weight & is_shared & is_each
        is_large = message_sizes >= ALONE_BYTES
        backward = unsent + self._sent_alive(values.gradient_first, message_sizes, is_sent & is_large)
        parts = message_sizes * shard_sizes / np.maximum(sizes, 1)
        is_small = is_sent & ~is_large
        backward += self._coalesced_alive(values.gradient_first, message_sizes, parts, is_small)
        messages = self._messages(values.gradient_first, message_sizes, is_sent, is_large, unsent)
        coalesced = np.bincount(self._unit[values.first[small]], sizes[small], n_units) * (1 if alone else _BUNDLES)
        if is_small.any():  # the parts of the last message arrive while the rank holds what it sent, but no more gathered weights
            arriving = min(float(parts[is_small].sum()), BUNDLE_BYTES)
            backward[values.gradient_first[is_small].min()] += max(arriving - coalesced.sum(), 0)
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
            messages=messages,
            recomputed=self._recomputed(values, sizes),
        )

    def _recomputed(self, values: Values, sizes: Floats) -> RecomputedValues:
        """Return the values that backwards of later units compute again, with the last of which all phases hold them."""
        made, needed = self._unit[values.first], self._unit[np.minimum(values.needed_last // 2, self._n_steps - 1)]
        last_phases = 2 * np.append(self._starts[1:], self._n_steps) - 1
        needed = needed - ((values.needed_last | 1) < last_phases[needed])
        mask = values.is_recomputed & (needed > made)
        return RecomputedValues(made[mask], needed[mask], sizes[mask])

    def _values(self, n_stages: int) -> Values:
        """Return the lifetimes of all allocations, with weights that units of different stages use taken apart."""
        if n_stages not in self._of_stages:
            longest = len(self._starts) / n_stages
            taken = uses_apart(self._cost, self._order, self._selection, self._unit, longest) if n_stages > 1 else None
            cost, order, saving = taken or (self._cost, self._order, Saving(self._selection.needed, self._selection.savers))
            self._of_stages[n_stages] = lifetimes(cost, order, self._selection, saving, self._parameters, self._casts)
        return self._of_stages[n_stages]

    def _backward(
        self, values: Values, sizes: Floats, sum_sizes: Floats, small: Flags, is_shared: Flags, is_each: Flags
    ) -> tuple[Floats, Floats]:
        """Return (2 x calls,) bytes in each phase of a backward: of all but gradients of weights, and of these until they are sent.

        The phases of call n are 2 n + 1, which comes first, and 2 n.

        Args:
            small: (V,) whether it is gathered with others.
            is_shared: (V,) whether ranks store shards of the value.
            is_each: (V,) whether each backward sends its gradient; others are added whole, and count as gradients at once.
        """
        is_value = values.has_gradient & ~values.is_returned & ~values.is_weight & (values.gradient_first <= values.gradient_last)
        is_summed = values.has_gradient & values.is_weight & (is_shared | (sum_sizes > 0))
        of_inputs = self._alive(sizes, is_value, values.gradient_first, values.gradient_last)
        of_inputs += self._gathered_alive(values, sizes, values.is_gathered_back & ~small, back=True)
        of_inputs += self._alive(sizes, values.is_recomputed, values.needed_first, values.needed_last | 1)
        made, last = values.gradient_first, np.maximum(values.gradient_last, values.gradient_first)
        of_weights = self._alive(sizes, is_summed & is_each, made, last) + self._alive(sum_sizes, is_summed & is_each, made, made)
        return of_inputs, of_weights + self._alive(sizes, is_summed & ~is_each & (sum_sizes > 0), made, made)

    def _messages(self, first: Integers, sizes: Floats, is_sent: Flags, is_large: Flags, unsent: Floats) -> GradientMessages:
        """Return the messages of all units: of gradients that are made in phases ``first``, if they are sent.

        Args:
            unsent: (2 x calls,) bytes in each phase of a backward, without what is under way.
        """
        n_units = len(self._starts)
        last, begins = np.zeros((n_units, MOST_UNDER_WAY)), 2 * self._starts
        for value in sorted(np.flatnonzero(is_sent & is_large).tolist(), key=first.__getitem__, reverse=True):
            unit = self._unit[first[value] // 2]
            last[unit] = [sizes[value], *last[unit, :-1]]
            begins[unit] = max(begins[unit], first[value])
        before = np.where(np.arange(len(unsent)) >= np.repeat(begins, 2 * np.diff([*self._starts, self._n_steps])), unsent, -np.inf)
        has_small = np.bincount(self._unit[first[is_sent & ~is_large] // 2], minlength=n_units) > 0
        return GradientMessages(np.rint(np.maximum.reduceat(before, 2 * self._starts)), np.rint(last), has_small)

    def _sent_alive(self, first: Integers, sizes: Floats, mask: Flags) -> Floats:
        """Return (2 x calls,) bytes of gradients, made in phases ``first``, on their way: until as many others left as may be under way."""
        sent = np.flatnonzero(mask)
        sent = sent[np.argsort(-first[sent], kind="stable")]
        until = first.copy()
        until[sent[:-MOST_UNDER_WAY]] = first[sent[MOST_UNDER_WAY:]]
        return self._alive(sizes, mask, until, first - 1)

    def _coalesced_alive(self, first: Integers, sizes: Floats, parts: Floats, mask: Flags) -> Floats:
        """Return (2 x calls,) bytes of small gradients, made in phases ``first``, that wait for those that share their message.

        Args:
            parts: bytes of the rank's part of the sum of each, which counts as a gradient from then on.
        """
        made = np.bincount(first[mask], (sizes - parts)[mask], 2 * self._n_steps)
        waiting: Floats = np.minimum(np.cumsum(made[::-1])[::-1] - made, BUNDLE_BYTES)
        return waiting

    def _gradients_alive(self, gradients: Sequence[Gradient], n_units: int) -> tuple[Floats, Floats]:
        """Return (2 x calls,) bytes of the gradients that the unit of each phase has computed by then, and (N,) those of each unit."""
        ends = 2 * np.append(self._starts[1:], self._n_steps) - 1
        unit, size = np.array([each.unit for each in gradients], np.int64), np.array([each.size for each in gradients])
        steps = [max((self._last_step.get(name, self._n_steps) for name in each.readers), default=self._n_steps) for each in gradients]
        last = np.minimum(2 * np.array(steps, np.int64) + 1, ends[unit])
        held = np.zeros(n_units)
        np.add.at(held, unit, size)
        return self._alive(size, np.ones(len(size), np.bool_), 2 * self._starts[unit], last), held

    def _freed(self, values: Values, sizes: Floats, is_shared: Flags, *, alone: bool) -> Floats:
        """Return (2 x calls,) bytes of the saved values that a backward has freed by each phase, but whose unit it has not left yet.

        So are gradients of results that were gathered: a backward begins with taking the rank's parts of them.
        """
        mask = (values.saved_first >= 0) & (alone | ~values.is_once)
        start = 2 * self._starts[self._unit[values.saved_first]]
        taken = values.is_returned & values.has_gradient & is_shared
        places = np.full(len(sizes), 2 * self._starts[-1]), np.full(len(sizes), 2 * self._n_steps - 3)
        return self._alive(sizes, mask, start, values.freed_in) + self._alive(sizes, taken, *places)

    def _alive(self, sizes: Floats, mask: Flags, first: Integers, last: Integers, phases: int = _PHASES) -> Floats:
        """Return (``phases`` x calls,) bytes of the masked allocations alive in each: a sweep over lifetimes ``first`` to ``last``."""
        n_places = phases * self._n_steps
        allocated = np.bincount(first[mask], sizes[mask], n_places + 1)
        freed = np.bincount(last[mask] + 1, sizes[mask], n_places + 1)
        alive: Floats = np.cumsum(allocated - freed, dtype=float)[:-1]  # counts of no allocations are integers
        return alive

    def _gathered_alive(self, values: Values, sizes: Floats, mask: Flags, *, back: bool) -> Floats:
        """Return (calls,) bytes of gathered weights at each call: each is alive from the use of the weight before it (prefetch).

        In the backward (``back``), (2 x calls,) for its phases, calls run in reverse, so that a weight is alive until the use of the one
        after it.
        """
        weights = np.flatnonzero(mask)
        first, last = values.first.copy(), (values.needed_last if back else values.last).copy()
        if back:
            weights = weights[np.argsort(-last[weights], kind="stable")]
            last[weights[1:]] = last[weights[:-1]]
            return self._alive(sizes, mask, values.needed_first, last)
        weights = weights[np.argsort(first[weights], kind="stable")]
        first[weights[1:]] = first[weights[:-1]]
        return self._alive(sizes, mask, first, last, 1)
