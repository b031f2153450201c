"""A schedule compiled to rows of numbers, to be simulated for many stage times: dependencies of actions are resolved once.

    row    action   waits for, of its own rank   waits for, of another stage
    0      0F0      -                            -
    1      1F0      -                            row 0, what stage 0 sends
    2      1B0      row 1                        -
    3      0B0      row 0                        row 2, the gradient that stage 1 sends

Rows are in topological order. ``clock.run_on_clock`` returns the start of every action, ``StepClock.makespan`` the end of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.schedules.catalog import make_schedule
from passes.ir.errors import VerificationError
from passes.ir.schedule import Action, ActionKind, Schedule

_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD)
"""The order of the durations in ``StepClock.makespan``."""

_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}


class StepClock:
    """Step time and peak memory of one schedule, for many stage times and sizes.

    Args:
        schedule: every stage has a forward and a backward for every microbatch.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    @cached_property
    def _rows(self) -> tuple[tuple[int, int, int, int], ...]:
        return tuple(_rows(self.schedule))

    @cached_property
    def _last_rows(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the row of its last action on each of its ranks."""
        last: list[dict[int, int]] = [{} for _ in range(self.schedule.n_stages)]  # the first row of a rank -> row
        first_rows: list[int] = []
        for row, (previous, _, _, duration) in enumerate(self._rows):
            first_rows.append(row if previous < 0 else first_rows[previous])
            last[duration % self.schedule.n_stages][first_rows[row]] = row
        return tuple(tuple(rows.values()) for rows in last)

    @cached_property
    def _counts_of_ranks(self) -> tuple[_MemoryCounts, ...]:
        return tuple(_memory_counts(actions) for actions in self.schedule.actions)

    def peak_memory(
        self,
        saved: Sequence[float],
        gradients: Sequence[float],
        transient: Sequence[Sequence[float]] = (),
        bucket_limit: float = 0.0,
        received: Sequence[float] = (),
        sent: Sequence[float] = (),
        between: Sequence[float] = (),
        waiting: Mapping[tuple[int, int], float] | None = None,
        under_way: Sequence[float] = (),
        unsent: Sequence[float] = (),
    ) -> tuple[float, ...]:
        """Return for each rank the peak bytes of all its stages, beside the memory that is allocated all the time.

        Args:
            saved: for each stage, bytes of the saved activations of one microbatch, from its forward to its backward or input half.
            gradients: for each stage, bytes of the gradients of parameters, from its first whole backward or weight half on.
            transient: for each kind of action, in the order of ``makespan``, and each stage: bytes during its actions alone.
            bucket_limit: the most bytes of gradients that are in memory twice, in buckets, at the end.
            received, sent: for each stage, bytes that its forward, and its backward, receives; receives are posted one action ahead.
            between: for each stage, bytes of one microbatch from the end of its input half to its weight half.
            waiting: for pairs (stage, later stage of its rank), bytes of gradients that the later one's backward leaves for the stage's.
            under_way: for each stage, bytes of its gradients that are on their way to their sums after its first backward. Later backwards
                wait for theirs, to add them; the next backward of the rank waits for these before it sends more.
            unsent: for each stage, bytes during its backward alone, until it sends a gradient.
        """
        zeros = [0.0] * len(saved)
        by_kind = [*transient] or [zeros] * len(_KINDS)
        sizes = np.array([saved, between or zeros, gradients, received or zeros, sent or zeros, *by_kind], dtype=float)
        after_first, early = np.array([under_way or zeros, unsent or zeros], dtype=float)
        peaks = []
        for stages, counts, between_stages, sends in self._counts_of_ranks:
            bytes_during_actions = np.einsum("nks,ks->n", counts, sizes[:, stages])
            for (stage, later), size in (waiting or {}).items():
                if stage in stages and later in stages:
                    bytes_during_actions += size * between_stages[:, stages.index(stage), stages.index(later)]
            if any(under_way):
                late = counts[:, -2:].sum(axis=1)  # of actions that send gradients
                computing = np.einsum("nks,ks->n", counts[:, -2:], sizes[-2:, stages])
                before_sending = bytes_during_actions - computing + counts[:, -1] @ early[stages]
                before_sending = np.where(late.any(axis=1), before_sending, bytes_during_actions) + sends @ after_first[stages]
                bytes_during_actions = np.maximum(bytes_during_actions, before_sending)
            gradient_bytes = float(sizes[2, stages].sum())
            bytes_at_end = gradient_bytes + min(gradient_bytes, bucket_limit)
            peaks.append(max(float(bytes_during_actions.max(initial=0.0)), bytes_at_end))
        return tuple(peaks)

    def makespan(self, *columns: Sequence[float]) -> float:
        """Return the seconds until the last action has ended; arguments as in ``stage_ends``."""
        return max(self.stage_ends(*columns))

    def stage_ends(
        self,
        forward: Sequence[float],
        backward_input: Sequence[float],
        backward_weight: Sequence[float],
        send: Sequence[float],
        send_gradient: Sequence[float],
        shares: Sequence[float] = (),
    ) -> tuple[float, ...]:
        """Return for each stage the seconds until its last action has ended; the others are seconds, one for each stage.

        Args:
            send: until what a stage sends forward has arrived.
            send_gradient: until the gradients that it sends back have arrived.
            shares: for each stage, the part of messages to and from the next one that processors move (``Link.host_share``).
        """
        whole = [input_half + weight_half for input_half, weight_half in zip(backward_input, backward_weight, strict=True)]
        durations = [*forward, *backward_input, *backward_weight, *whole]
        message_times = [*send, *send_gradient, 0.0]
        ends = [0.0]  # row r ends at ends[r + 1]; row -1 stands for no row
        if any(shares):
            self._end_with_host_delays(ends, durations, message_times, [*shares, 0.0, *shares[:-1], 0.0])
        else:
            for previous, producer, message, duration in self._rows:
                free_at, arrives_at = ends[previous + 1], ends[producer + 1] + message_times[message]
                ends.append((arrives_at if arrives_at > free_at else free_at) + durations[duration])  # noqa: FURB136  max() is slow, per row
        return tuple(max([ends[row + 1] for row in rows]) for rows in self._last_rows)

    def _end_with_host_delays(
        self, ends: list[float], durations: Sequence[float], message_times: Sequence[float], shares: Sequence[float]
    ) -> None:
        """Append the end of each row where receivers move a part of each message, ``shares``: inlines ``clock.host_delay`` for speed."""
        for previous, producer, message, duration in self._rows:
            free_at, sent_at = ends[previous + 1], ends[producer + 1]
            arrives_at = sent_at + message_times[message]
            start, overlap = (arrives_at, free_at - sent_at) if arrives_at > free_at else (free_at, arrives_at - sent_at)
            if overlap > 0:
                start += shares[message] * overlap
            ends.append(start + durations[duration])


@lru_cache(maxsize=64)
def step_clock(name: str, n_ranks: int, n_microbatches: int, stages_per_rank: int, replicas: tuple[int, ...] = ()) -> StepClock:
    """Return the clock of a schedule by name, from a cache of recent ones. Raises as ``make_schedule`` does."""
    return StepClock(make_schedule(name, n_ranks, n_microbatches, stages_per_rank, replicas))


class _MemoryCounts(NamedTuple):
    """How many of the sizes of ``StepClock.peak_memory`` are in memory during each action of a rank.

    Attributes:
        stages: of the rank.
        of_stages: (actions, 9, stages) microbatches before the end of their backward or input half; those between halves; 1 if the stage
            has gradients; 1 if the next action is its forward, whose message is being received; 1 if that is its backward; and for each
            kind of action, 1 if it does that.
        waiting: (actions, stages, stages) microbatches whose backward or input half is done in the second stage, and not in the first.
        sends: (actions, stages) 1 if gradients that the stage's first backward sent may be under way as the action starts.
    """

    stages: list[int]
    of_stages: NDArray[np.int64]
    waiting: NDArray[np.int64]
    sends: NDArray[np.int64]


def _memory_counts(actions: Sequence[Action]) -> _MemoryCounts:
    """Count what is in memory during the actions of a rank."""
    stages = sorted({action.stage for action in actions})
    kind = np.array([_NUMBER[action.kind] for action in actions], dtype=np.int64)
    acts = np.eye(len(stages), dtype=np.int64)[[stages.index(action.stage) for action in actions]]
    zero = np.zeros((1, len(stages)), dtype=np.int64)

    def acts_with(*kinds: ActionKind) -> NDArray[np.int64]:
        return np.where(np.isin(kind, [_NUMBER[wanted] for wanted in kinds])[:, None], acts, 0)

    forwards = acts_with(ActionKind.FORWARD)
    backwards = acts_with(ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    whole, inputs, weights = (acts_with(each) for each in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT))
    halved, split, freed = (np.concatenate([zero, each.cumsum(axis=0)])[: len(actions)] for each in (backwards, inputs, whole + weights))
    in_flight, has_gradients = forwards.cumsum(axis=0) - halved, (freed > 0).astype(np.int64)
    between = split - np.concatenate([zero, weights.cumsum(axis=0)])[: len(actions)]
    next_forwards, next_backwards = (np.concatenate([current, zero])[1:] for current in (forwards, backwards))
    by_kind = [acts_with(each) for each in _KINDS]
    of_stages = np.stack([in_flight, between, has_gradients, next_forwards, next_backwards, *by_kind], axis=1)
    waiting = halved[:, None, :] - (halved + backwards)[:, :, None]
    return _MemoryCounts(stages, of_stages, waiting, _sends_under_way(whole + weights))


def _sends_under_way(sends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (actions, stages) 1 for the stage of the last action before each that sends gradients, if it was the stage's first.

    Args:
        sends: (actions, stages) 1 if the action sends gradients of the stage.
    """
    is_first = sends * (sends.cumsum(axis=0) == 1)
    under_way = np.zeros_like(sends)
    for place in range(1, len(sends)):
        under_way[place] = is_first[place - 1] if sends[place - 1].any() else under_way[place - 1]
    return under_way


def _rows(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """Return a row (previous, producer, message, duration) for each action, in topological order; -1 stands for no row.

    previous    the row of the action before it on its rank
    producer    the row of the other stage's action whose result it needs
    message     index of that result's time in ``[*send, *send_gradient, 0.0]``
    duration    index of its duration: number of its kind in ``_KINDS`` times stages, plus its stage
    """
    n_stages, n = schedule.n_stages, schedule.n_microbatches
    rows: list[tuple[int, int, int, int]] = []
    forwards, backwards = [-1] * (n_stages * n), [-1] * (n_stages * n)  # at stage * n + microbatch: the row
    done, last = [0] * schedule.n_ranks, [-1] * schedule.n_ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                producer, message = _producer(action, n_stages, n, forwards, backwards)
                if producer is None:
                    break
                row = len(rows)
                rows.append((last[rank], producer, message, _NUMBER[action.kind] * n_stages + action.stage))
                if action.kind is ActionKind.FORWARD:
                    forwards[action.stage * n + action.microbatch] = row
                elif action.kind is not ActionKind.BACKWARD_WEIGHT:
                    backwards[action.stage * n + action.microbatch] = row
                done[rank], last[rank], progress = done[rank] + 1, row, True
    if len(rows) < sum(map(len, schedule.actions)):
        raise VerificationError(f"schedule {schedule.name} cannot run: ranks wait for each other", remedy="see schedules.clock")
    return rows


def _producer(action: Action, n_stages: int, n: int, forwards: Sequence[int], backwards: Sequence[int]) -> tuple[int | None, int]:
    """Return (row of the producer, index of its message) for an action; see ``_rows``.

    The row is -1 if no other stage's result is needed, and None while the producer has no row yet.

    Args:
        n: number of microbatches.
        forwards, backwards: the row of each action at ``stage * n + microbatch``; -1: it has none yet.
    """
    stage, place = action.stage, action.stage * n + action.microbatch
    no_message = 2 * n_stages
    if action.kind is ActionKind.FORWARD:
        if stage == 0:
            return -1, no_message
        row = forwards[place - n]
        return (None if row < 0 else row), stage - 1
    if action.kind is ActionKind.BACKWARD_WEIGHT or stage == n_stages - 1:
        return -1, no_message
    row = backwards[place + n]
    return (None if row < 0 else row), n_stages + stage + 1
