"""A schedule on a clock: every action takes a fixed time, communication takes none.

The papers reason about schedules in this model, so their bubble formulas hold here exactly. An action starts when its rank is free and
what it needs is there:

    F of stage s    the F of stage s-1 on the same microbatch
    B or I of s     its own F, and the B or I of stage s+1
    W of s          its own I
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.ir.errors import ConfigError, VerificationError
from passes.ir.schedule import Action, ActionKind, Schedule

__all__ = ["Durations", "Timeline", "draw", "simulate"]

_Result = tuple[int, ActionKind, int]
"""Something computed: a stage, FORWARD, BACKWARD_INPUT or BACKWARD_WEIGHT, a microbatch."""


@dataclass(frozen=True)
class Durations:
    """How long an action of each kind takes, in any unit of time; ``backward`` is the sum of its halves unless it is given."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    backward: float | None = None

    def of(self, kind: ActionKind) -> float:
        whole = self.backward_input + self.backward_weight if self.backward is None else self.backward
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: whole,
            ActionKind.BACKWARD_INPUT: self.backward_input,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


_UNIT = Durations()


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule runs.

    Attributes:
        schedule: what was run.
        durations: how long its actions take.
        start: for each rank, when each of its actions starts, in the order of ``schedule.actions``.
        busy: for each rank, the time that it computes.
        finish: for each rank, when its last action ends.
    """

    schedule: Schedule
    durations: Durations
    start: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]
    finish: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last action of all ends."""
        return max(self.finish)

    @property
    def longest_span(self) -> float:
        """The longest time from a rank's first action to the end of its last."""
        return max(finish - start[0] for start, finish in zip(self.start, self.finish, strict=True) if start)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time, from the first start to the last end, that is idle (Huang et al. 2019)."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def span_bubble_fraction(self) -> float:
        """The idle share of the rank that takes longest, each on its own clock (Qi et al. 2023).

        This is the price of a step among many when no barrier stands between steps: a rank that starts later also ends later.
        """
        return 1 - max(self.busy) / self.longest_span


def simulate(schedule: Schedule, durations: Durations = _UNIT) -> Timeline:
    """Run a schedule on the clock.

    Raises:
        VerificationError: the schedule cannot run: ranks wait for each other, or for what no rank computes, or compute twice.
    """
    ready: dict[_Result, float] = {}
    starts: list[list[float]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.n_ranks
    times = {kind: durations.of(kind) for kind in ActionKind}
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while len(starts[rank]) < len(actions):
                action = actions[len(starts[rank])]
                arrivals = [ready.get(need) for need in _needs(action, schedule.n_stages)]
                known = [arrival for arrival in arrivals if arrival is not None]
                if len(known) < len(arrivals):
                    break
                starts[rank].append(max([clock[rank], *known]))
                clock[rank] = starts[rank][-1] + times[action.kind]
                for result in _results(action):
                    if result in ready:
                        raise VerificationError(f"schedule {schedule.name} computes {Action(*result)} twice", remedy=f"leave {action} out")
                    ready[result] = clock[rank]
                progress = True
    heads = {rank: actions[len(starts[rank])] for rank, actions in enumerate(schedule.actions) if len(starts[rank]) < len(actions)}
    if heads:
        raise _stuck(schedule, heads, set(ready))
    busy = tuple(sum(times[action.kind] for action in actions) for actions in schedule.actions)
    return Timeline(schedule, durations, tuple(tuple(rank_starts) for rank_starts in starts), busy, tuple(clock))


def draw(schedule: Schedule, durations: Durations = _UNIT) -> str:
    """Rank against time as text: a line a rank, a cell a unit of time, bubbles dotted.

    Raises:
        ConfigError: a duration is not a positive whole number.
        VerificationError: the schedule cannot run.
    """
    for kind in ActionKind:
        if durations.of(kind) < 1 or durations.of(kind) % 1:
            raise ConfigError(f"a {kind.value} of {durations.of(kind)} units cannot be drawn", remedy="give whole durations of 1 or more")
    timeline = simulate(schedule, durations)
    cell = max(len(str(action)) for action in schedule) + 1
    lines = []
    for rank, (actions, starts) in enumerate(zip(schedule.actions, timeline.start, strict=True)):
        line = "|"
        for action, start in zip(actions, starts, strict=True):
            idle = int(start) * cell + 1 - len(line)
            if idle:
                line += "." * (idle - 1) + "|"
            line += str(action).ljust(int(durations.of(action.kind)) * cell - 1) + "|"
        lines.append(f"rank {rank:<{len(str(schedule.n_ranks - 1))}} {line}")
    return "\n".join(lines)


def _needs(action: Action, n_stages: int) -> list[_Result]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        return [(stage - 1, ActionKind.FORWARD, microbatch)] if stage > 0 else []
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return [(stage, ActionKind.BACKWARD_INPUT, microbatch)]
    own = (stage, ActionKind.FORWARD, microbatch)
    return [own, (stage + 1, ActionKind.BACKWARD_INPUT, microbatch)] if stage + 1 < n_stages else [own]


def _results(action: Action) -> list[_Result]:
    """What the action computes; a whole backward is both halves."""
    halves = [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
    kinds = halves if action.kind is ActionKind.BACKWARD else [action.kind]
    return [(action.stage, kind, action.microbatch) for kind in kinds]


def _stuck(schedule: Schedule, heads: dict[int, Action], ready: set[_Result]) -> VerificationError:
    """Follow who waits for whom, from one rank that is stuck, to a rank met before or to a result that nobody computes.

    Args:
        schedule: what cannot go on.
        heads: for each rank that is not done, the action that it waits with.
        ready: all that has been computed.
    """
    producers = {
        result: (rank, action) for rank, actions in enumerate(schedule.actions) for action in actions for result in _results(action)
    }
    waits: dict[int, str] = {}
    rank = min(heads)
    while rank not in waits:
        missing = next(need for need in _needs(heads[rank], schedule.n_stages) if need not in ready)
        if missing not in producers:
            return VerificationError(
                f"schedule {schedule.name} cannot run: {heads[rank]} of rank {rank} needs {Action(*missing)}, which no rank computes",
                remedy="give every stage a forward and a backward for every microbatch",
            )
        producer, awaited = producers[missing]
        waits[rank] = f"rank {rank} at {heads[rank]} waits for {awaited} of rank {producer}"
        rank = producer
    circle = list(waits)[list(waits).index(rank) :]
    return VerificationError(
        f"schedule {schedule.name} cannot run: {'; '.join(waits[rank] for rank in circle)}",
        remedy="order the actions of each rank so that what comes first never waits for what comes later",
    )
