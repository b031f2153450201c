"""A schedule compiled to rows of numbers, to be simulated for many stage times: the dependences of its actions, resolved once.

    row    action   waits for, of its own rank   waits for, of another stage
    0      0F0      -                            -
    1      1F0      -                            row 0, what stage 0 sends
    2      1B0      row 1                        -
    3      0B0      row 0                        row 2, the gradient that stage 1 sends

Rows are in topological order. ``clock.run_on_clock`` gives the start of every action; this gives the end of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from partitioner.schedules.catalog import make_schedule
from passes.ir.errors import VerificationError
from passes.ir.schedule import Action, ActionKind, Schedule

__all__ = ["StepClock", "step_clock"]

_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD)
"""Times of stages are given in this order."""

_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}


class StepClock:
    """A schedule, to be run on the clock many times.

    Args:
        schedule: every stage has a forward and a backward for every microbatch.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._rows = tuple(_rows(schedule))

    @cached_property
    def _states(self) -> tuple[tuple[list[int], NDArray[np.int64]], ...]:
        return tuple(_states(actions) for actions in self.schedule.actions)

    def peak_memory(
        self,
        kept: Sequence[float],
        gradients: Sequence[float],
        working: Sequence[float],
        summed: float = 0.0,
        entering: Sequence[float] = (),
        leaving: Sequence[float] = (),
    ) -> tuple[float, ...]:
        """Return for each rank the peak bytes of all its stages, beside the memory that is allocated all the time.

        Args:
            kept: for each stage, saved activations of one microbatch.
            gradients: for each stage, gradients of parameters, from its first whole backward or weight half on.
            working: for each stage, transient memory during its actions.
            summed: limit of gradients that are in memory twice, in buckets, at the end.
            entering, leaving: for each stage, bytes received for a forward, and sent; a backward receives as many as were sent.
                Receives are posted one action ahead.
        """
        sizes = np.array([kept, gradients, working, *(each or [0.0] * len(kept) for each in (entering, leaving))], dtype=float)
        peaks = []
        for stages, states in self._states:
            moments = np.einsum("nks,ks->n", states, sizes[:, stages])
            made = float(sizes[1, stages].sum())
            peaks.append(max(float(moments.max(initial=0.0)), made + min(made, summed)))
        return tuple(peaks)

    def makespan(
        self,
        forward: Sequence[float],
        backward_input: Sequence[float],
        backward_weight: Sequence[float],
        send: Sequence[float],
        send_gradient: Sequence[float],
        shares: Sequence[float] = (),
    ) -> float:
        """Return the seconds until the last action has ended; all arguments but the last are seconds, one for each stage.

        Args:
            send: until what a stage sends forward has arrived.
            send_gradient: until the gradients that it sends back have arrived.
            shares: the part of messages between a stage and the next that processors move (``Link.host_share``).
        """
        whole = [one + other for one, other in zip(backward_input, backward_weight, strict=True)]
        lasting = [*forward, *backward_input, *backward_weight, *whole]
        sending = [*send, *send_gradient, 0.0]
        if any(shares):
            return self._makespan_of_movers(lasting, sending, [*shares, 0.0, *shares[:-1], 0.0])
        ends = [0.0]
        for before, other, sent, lasts in self._rows:
            free, there = ends[before + 1], ends[other + 1] + sending[sent]
            ends.append((there if there > free else free) + lasting[lasts])  # noqa: FURB136  max() is a call, in every row
        return max(ends)

    def _makespan_of_movers(self, lasting: Sequence[float], sending: Sequence[float], shares: Sequence[float]) -> float:
        """The same where who receives moves a part of the message itself: ``clock.held_up``, written out because it is in every row."""
        ends = [0.0]
        for before, other, sent, lasts in self._rows:
            free, left = ends[before + 1], ends[other + 1]
            there = left + sending[sent]
            start, beside = (there, free - left) if there > free else (free, there - left)
            if beside > 0:
                start += shares[sent] * beside
            ends.append(start + lasting[lasts])
        return max(ends)


@lru_cache(maxsize=64)
def step_clock(name: str, n_ranks: int, n_microbatches: int, stages_per_rank: int, replicas: tuple[int, ...] = ()) -> StepClock:
    """Return the clock of a schedule by name, from a cache of recent ones. Raises as ``make_schedule`` does."""
    return StepClock(make_schedule(name, n_ranks, n_microbatches, stages_per_rank, replicas))


def _states(actions: Sequence[Action]) -> tuple[list[int], NDArray[np.int64]]:
    """The stages of a rank, and (actions, 5, stages) of each.

    How many microbatches it holds, whether it has gradients, whether it acts, whether its forward, and its backward, comes next.
    """
    stages = sorted({action.stage for action in actions})
    kind = np.array([_NUMBER[action.kind] for action in actions], dtype=np.int64)
    acts = np.eye(len(stages), dtype=np.int64)[[stages.index(action.stage) for action in actions]]
    nothing = np.zeros((1, len(stages)), dtype=np.int64)

    def those(*kinds: ActionKind) -> NDArray[np.int64]:
        return np.where(np.isin(kind, [_NUMBER[each] for each in kinds])[:, None], acts, 0)

    forwards, backwards = those(ActionKind.FORWARD), those(ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    ended = np.concatenate([nothing, those(ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT).cumsum(axis=0)])[: len(actions)]
    following = (np.concatenate([each, nothing])[1:] for each in (forwards, backwards))
    return stages, np.stack([forwards.cumsum(axis=0) - ended, (ended > 0).astype(np.int64), acts, *following], axis=1)


def _rows(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """For each action: the row before it on its rank, the row of the other stage that it waits for (-1: none), what is sent, what lasts."""
    n_stages, n = schedule.n_stages, schedule.n_microbatches
    n_actions = sum(len(actions) for actions in schedule.actions)
    rows: list[tuple[int, int, int, int]] = []
    forwards, backwards = [-1] * (n_stages * n), [-1] * (n_stages * n)
    done, last = [0] * schedule.n_ranks, [-1] * schedule.n_ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                needs, sent = _needs(action, n_stages, n, forwards, backwards)
                if needs is None:
                    break
                number = len(rows)
                rows.append((last[rank], needs, sent, _NUMBER[action.kind] * n_stages + action.stage))
                if action.kind is ActionKind.FORWARD:
                    forwards[action.stage * n + action.microbatch] = number
                elif action.kind is not ActionKind.BACKWARD_WEIGHT:
                    backwards[action.stage * n + action.microbatch] = number
                done[rank], last[rank], progress = done[rank] + 1, number, True
    if len(rows) < n_actions:
        raise VerificationError(f"schedule {schedule.name} cannot run: ranks wait for each other", remedy="see schedules.clock for who")
    return rows


def _needs(action: Action, n_stages: int, n: int, forwards: Sequence[int], backwards: Sequence[int]) -> tuple[int | None, int]:
    """The row of another stage that an action waits for, and which message; None: not yet there."""
    stage, place = action.stage, action.stage * n + action.microbatch
    nothing = 2 * n_stages
    if action.kind is ActionKind.FORWARD:
        if stage == 0:
            return -1, nothing
        row = forwards[place - n]
        return (None if row < 0 else row), stage - 1
    if action.kind is ActionKind.BACKWARD_WEIGHT or stage == n_stages - 1:
        return -1, nothing
    row = backwards[place + n]
    return (None if row < 0 else row), n_stages + stage + 1
