"""Peak memory of stages beyond their permanent memory, from the sizes and numbers of the values that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
"""An array of seconds, bytes or counts."""

Integers: TypeAlias = NDArray[np.int64]
"""An array of units, boundaries or prices."""


class DynamicMemory(NamedTuple):
    """Memory of stages that changes during a step; arrays of one shape, such as an entry for each stage.

    before its first parameter gradients    in_flight microbatches + transient memory + a message that arrives
    after these                             later microbatches + gradients + transient memory + a message that arrives
    at the end of the step                  gradients, and a second copy of at most ``summed`` bytes of them during their reduction

    Messages for the next action arrive during an action: receives are posted one action ahead.

    Attributes:
        in_flight, later: the most microbatches held before, and after; if ``later`` is 0, the stage computes nothing after.
        kept: bytes of each microbatch.
        gradients: bytes of them.
        working: transient bytes.
        arriving: (microbatches held while a message arrives, bytes of it) for each kind of message, before.
        arriving_later: the same after.
        summed: the most bytes of gradients that exist twice.
    """

    in_flight: Floats
    later: Floats
    kept: Floats
    gradients: Floats
    working: Floats
    arriving: Sequence[tuple[Floats, Floats]]
    arriving_later: Sequence[tuple[Floats, Floats]]
    summed: float

    @property
    def peak(self) -> Floats:
        """The peak over the whole step, in bytes."""
        before = self._activations(self.in_flight, self.arriving)
        after = self._activations(self.later, self.arriving_later) + self.gradients
        if not self.later.all():
            after = np.where(self.later > 0, after, 0.0)
        reduction = self.gradients + np.minimum(self.gradients, self.summed)
        peak: Floats = np.maximum(np.maximum(before, after) + self.working, reduction)
        return peak

    def _activations(self, count: Floats, arriving: Sequence[tuple[Floats, Floats]]) -> Floats:
        """Return the peak bytes of saved activations and arriving messages; ``count``: the most microbatches without a message."""
        peak: Floats = count * self.kept
        for n_held, size in arriving:
            if n_held.any():
                with_message = n_held * self.kept + size
                peak = np.maximum(peak, with_message if n_held.all() else np.where(n_held > 0, with_message, 0.0))
        return peak

    @property
    def idle_peak(self) -> Floats:
        """The peak while another stage of the rank computes, in bytes."""
        peak: Floats = np.maximum(self.in_flight * self.kept, self.later * self.kept + self.gradients)
        return peak

    @property
    def computing(self) -> Floats:
        """Bytes beyond ``idle_peak`` while the stage itself computes."""
        return self.peak - self.idle_peak


class GradientMessages(NamedTuple):
    """The gradients that backwards of N units send to sums over ranks, each as soon as it is there; some are under way at once.

    Attributes:
        unsent: (N,) bytes as ``TransientMemory.backward``, until the unit's backward sends its first gradient; all, if it sends none.
        last: (N, M) bytes of the last M gradients that it sends, the last first; M are under way at once. 0: it sends fewer.
        has_small: (N,) whether it has gradients for a coalesced message, which is sent last; its bytes are not counted.
    """

    unsent: Floats
    last: Floats
    has_small: NDArray[np.bool_]

    def repeated(self, source: Integers) -> GradientMessages:
        """Return the messages of the given units."""
        return GradientMessages(self.unsent[source], self.last[source], self.has_small[source])

    def at_borders(self, starts: Sequence[int], gradients: Floats, saved: Floats) -> tuple[Floats, Floats]:
        """Return (S,) bytes under way after the backward of stages with these first units, and (S,) of a backward until it sends.

            under way      the last messages of its first units
            backward       the maximum of unsent(u) + gradients(u+1..j) - saved(u+1..j) over its last units u, to the one that sends first

        Args:
            gradients, saved: (N + 1,) prefix sums of those of units.
        """
        under_way, unsent = np.zeros(len(starts)), np.zeros(len(starts))
        for stage, (start, end) in enumerate(zip(starts, (*starts[1:], len(self.unsent)), strict=True)):
            sent = self.last[start:end].ravel()
            room = self.last.shape[1] - bool(self.has_small[start:end].any())
            under_way[stage] = sent[sent > 0][: max(room, 0)].sum()
            senders = np.flatnonzero(self.last[start:end].any(axis=1))
            first = start + int(senders[-1]) if len(senders) else start
            after = gradients[end] - gradients[first + 1 : end + 1] - saved[end] + saved[first + 1 : end + 1]
            unsent[stage] = max(float((self.unsent[first:end] + after).max()), 0.0)
        return under_way, unsent


class RecomputedValues(NamedTuple):
    """Values that backwards of later units than their own compute again, and hold until that of their own unit.

    A stage that begins in between receives what it reads of them: it counts among what it saves.

    Attributes:
        made: (C,) the unit that makes each in the forward.
        needed: (C,) the last unit whose whole backward holds it.
        size: (C,) bytes.
    """

    made: Integers
    needed: Integers
    size: Floats

    def repeated(self, source: Integers) -> RecomputedValues:
        """Return the values of the given units."""
        copies, values = np.nonzero(source[:, None] == self.made)
        return RecomputedValues(copies, copies + (self.needed - self.made)[values], self.size[values])

    def of_earlier_stages(self, starts: Sequence[int], n_units: int) -> Floats:
        """Return (N,) bytes of values of earlier stages, for units from that which makes a value to the last that holds it."""
        units = np.arange(n_units)
        first = np.repeat(starts, np.diff([*starts, n_units]))  # (N,) of the stage of each unit
        is_between = (self.made[:, None] < first) & (units <= self.needed[:, None])
        made_before: Floats = self.size @ is_between
        return made_before

    def of_block(self, start: int, stop: int, width: int) -> Floats:
        """Return (stop - start, width) bytes of values of earlier units, for 1..width units from each of ``start .. stop - 1``."""
        table = np.zeros((stop - start, stop - start + width))  # first unit of a run by unit
        reaches = (self.made < stop - 1) & (self.needed >= start)
        rows = np.maximum(self.made[reaches] + 1 - start, 0)
        np.add.at(table, (rows, np.minimum(self.needed[reaches] - start, table.shape[1] - 1)), self.size[reaches])
        held = np.cumsum(np.cumsum(table, axis=0)[:, ::-1], axis=1)[:, ::-1]
        first = np.arange(stop - start)[:, None]
        found: Floats = held[first, first + np.arange(width)]
        return found


@dataclass(frozen=True, eq=False)
class TransientMemory:
    """Memory of a stage while it computes, beside permanent memory and the saved activations of all microbatches in flight.

    A stage of units ``i..j`` needs the maximum over its units u of

        forward    forward(u) - saved(u+1..j)
        backward   backward(u) + gradients(u+1..j) - saved(u+1..j)

    and ``coalesced(i..j)``, at most ``coalesced_at_once``. Gradients reduced during the backward exist twice: ``gradients(u+1..j)`` is
    added once more, at most ``summed`` bytes, and at most the gradients of all units after u: an upper bound. Of a backward in two halves,
    the first has no gradients of parameters, and leaves what these are computed from, which the second frees:

        input half     inputs(u) + weights(u+1..j) - saved(u+1..j)
        weight half    gradients(u..j) + weights(i..u) - saved(i..j)

    There each microbatch in flight counts as ``saved`` and ``deferred``, which is subtracted here: ``deferred(i..j)``.

    Attributes:
        forward, backward: (N,) bytes that a unit computes with, beyond the saved activations of it and of the units before it.
        inputs: (N,) the same of a backward that computes no gradients of weights, and frees nothing.
        saved: (N,) bytes that each unit adds to the saved activations.
        gradients: (N,) bytes of the parameter gradients that exist after the unit's backward.
        coalesced: (N,) bytes of small weights gathered for each unit in coalesced messages.
        coalesced_at_once: the most bytes of these that exist at once.
        weights: (N,) bytes that a unit holds between the two halves of a backward: operands and gradients of results, for those of weights.
        is_split: whether backwards run in two halves.
        summed: the most bytes of gradients that exist twice during a backward.
        messages: the gradients that backwards send; None: none.
        recomputed: values that count in backwards of all units between, but for those of earlier stages; None: none.
    """

    forward: Floats
    backward: Floats
    inputs: Floats
    saved: Floats
    gradients: Floats
    coalesced: Floats
    coalesced_at_once: float
    weights: Floats
    is_split: bool = False
    summed: float = 0.0
    messages: GradientMessages | None = None
    recomputed: RecomputedValues | None = None

    @staticmethod
    def nothing(n_units: int) -> TransientMemory:
        """Return the table of units without transient memory."""
        nothing = np.zeros(n_units)
        return TransientMemory(nothing, nothing, nothing, nothing, nothing, nothing, 0.0, nothing)

    def repeated(self, source: Integers) -> TransientMemory:
        """Return the table of the given units, in any order and with repetition."""
        names = ("forward", "backward", "inputs", "saved", "gradients", "coalesced", "weights")
        messages = None if self.messages is None else self.messages.repeated(source)
        recomputed = None if self.recomputed is None else self.recomputed.repeated(source)
        return replace(self, messages=messages, recomputed=recomputed, **{name: getattr(self, name)[source] for name in names})

    def split(self) -> TransientMemory:
        """Return the table for backwards in two halves."""
        return replace(self, is_split=True)

    @cached_property
    def deferred(self) -> Floats:
        """(N,) bytes beyond ``saved`` that each unit holds between the two halves of a backward, if all saved values are held as long."""
        total = self.weights.sum()
        return self.weights * max(1 - self.saved.sum() / total, 0.0) if total else self.weights

    @cached_property
    def _sums(self) -> Floats:
        """(5, N + 1) prefix sums of saved, gradients, coalesced, weights and deferred."""
        columns = self.saved, self.gradients, self.coalesced, self.weights, self.deferred
        return np.pad(np.cumsum(columns, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def _peaks(self) -> Floats:
        """(3, N) the terms in u of forward, backward, and backward with gradients twice; sums over ``u+1..j`` begin as ``-_sums`` at u.

        Of a backward in two halves: of forward, input half and weight half.
        """
        saved, gradients, _, weights, _ = self._sums[:, 1:]
        if self.is_split:
            return np.stack([self.forward + saved, self.inputs - weights + saved, self.gradients - gradients + weights])
        backward = self.backward - gradients + saved
        twice = np.minimum(gradients[-1] - gradients, self.summed)
        return np.stack([self.forward + saved, backward + twice, backward - gradients])

    def of_block(self, start: int, stop: int, width: int) -> Floats:
        """Return (stop - start, width) bytes of the runs of 1..width units from each of the units ``start .. stop - 1``."""
        first = np.arange(start, stop)[:, None]
        last = np.minimum(first + np.arange(width), len(self.saved) - 1)
        earlier = 0.0 if self.recomputed is None else self.recomputed.of_block(start, stop, width)
        return self._of_runs(np.maximum.accumulate(self._without(earlier, self._peaks[:, last]), axis=2), first, last + 1)

    def of_stages(self, starts: Sequence[int]) -> Floats:
        """Return (S,) bytes of the stages with these first units."""
        ends = np.array([*starts[1:], len(self.saved)])
        earlier = 0.0 if self.recomputed is None else self.recomputed.of_earlier_stages(starts, len(self.saved))
        return self._of_runs(np.maximum.reduceat(self._without(earlier, self._peaks), starts, axis=1), np.array(starts), ends)

    def _without(self, earlier: Floats | float, peaks: Floats) -> Floats:
        """Return terms of ``_peaks`` without the values of earlier stages, which backwards do not compute again."""
        forward, first, second = peaks
        return np.stack([forward, first - earlier, second if self.is_split else second - earlier])

    def by_action(self, starts: Sequence[int]) -> Floats:
        """Return (4, S) bytes of the stages with these first units in a forward, and the input half, weight half and whole of a backward.

        They are beyond the saved activations, and beyond ``weights`` in a weight half.

            input half     inputs(u) + weights(u+1..j) - saved(u+1..j)
            weight half    gradients(u..j) - weights(u+1..j)
        """
        ends = np.array([*starts[1:], len(self.saved)])
        saved, gradients, coalesced, held, _ = self._sums
        twice = np.minimum(gradients[-1] - gradients[1:], self.summed)
        freed = (saved - held)[1:], gradients[1:] - saved[1:], (gradients - held)[1:]
        earlier = 0.0 if self.recomputed is None else self.recomputed.of_earlier_stages(starts, len(self.saved))
        inputs, backward = self.inputs - earlier, self.backward - earlier
        terms = np.stack([self.forward + saved[1:], inputs + freed[0], self.gradients - freed[2], backward + twice - freed[1]])
        highest = np.maximum.reduceat(terms, starts, axis=1)
        after = np.stack([-saved[ends], (held - saved)[ends], (gradients - held)[ends], (gradients - saved)[ends]])
        computing: Floats = np.maximum(highest + after, 0.0) + np.minimum(coalesced[ends] - coalesced[starts], self.coalesced_at_once)
        return computing

    def messages_of_stages(self, starts: Sequence[int]) -> Floats:
        """Return (2, S) bytes of stages with these first units (``GradientMessages.at_borders``)."""
        if self.messages is None:
            return np.zeros((2, len(starts)))
        saved, gradients = self._sums[:2]
        return np.stack(self.messages.at_borders(starts, gradients, saved))

    def _of_runs(self, highest: Floats, start: Integers, end: Integers) -> Floats:
        """Return the bytes of the runs ``start .. end - 1``: the terms in i and j, added to the maxima of ``_peaks`` over the run."""
        forward, first, second = highest
        saved, gradients, coalesced, held, deferred = self._sums
        if self.is_split:
            twice = np.minimum(gradients[end] - gradients[start], self.summed)
            second = second + gradients[end] + twice - held[start] - saved[end] + saved[start]
            backward = np.maximum(first + held[end] - saved[end], second)
            deferral = deferred[end] - deferred[start]
            forward, backward = forward - deferral, backward - deferral
        else:
            backward = np.minimum(first + gradients[end], second + 2 * gradients[end]) - saved[end]
        computing: Floats = np.maximum(np.maximum(forward - saved[end], backward), 0.0)
        weights: Floats = np.minimum(coalesced[end] - coalesced[start], self.coalesced_at_once)
        return computing + weights
