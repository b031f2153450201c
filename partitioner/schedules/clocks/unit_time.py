"""The clock of the papers: an action takes a fixed time by its kind, communication takes none.

The papers reason about schedules in this model, so their bubble formulas hold here exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.schedules.clocks.clock import Timing, run_on_clock
from passes.ir.errors import ConfigError
from passes.ir.schedule import ActionKind, Schedule


@dataclass(frozen=True)
class Durations:
    """How long an action of each kind takes, in any unit of time; ``backward`` is the sum of its halves unless it is given."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    backward: float | None = None

    def of(self, kind: ActionKind) -> float:
        """Return the duration of an action of this kind."""
        whole = self.backward_input + self.backward_weight if self.backward is None else self.backward
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: whole,
            ActionKind.BACKWARD_INPUT: self.backward_input,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


_UNIT = Durations()


def simulate(schedule: Schedule, durations: Durations = _UNIT) -> Timing:
    """Run a schedule on the clock.

    Raises:
        VerificationError: the schedule cannot run: ranks wait for each other, or for what no rank computes, or compute twice.
    """
    times = {kind: durations.of(kind) for kind in ActionKind}
    return run_on_clock(schedule, lambda action: times[action.kind])


def draw(schedule: Schedule, durations: Durations = _UNIT) -> str:
    """Return the timeline as text: a line a rank, a cell a unit of time, bubbles dotted.

    Raises:
        ConfigError: a duration is not a positive whole number.
        VerificationError: the schedule cannot run.
    """
    for kind in ActionKind:
        if durations.of(kind) < 1 or durations.of(kind) % 1:
            raise ConfigError(f"a {kind.value} of {durations.of(kind)} units cannot be drawn", remedy="give whole durations of 1 or more")
    timing = simulate(schedule, durations)
    cell = max(len(str(action)) for action in schedule) + 1  # characters for a unit of time, with the bar after it
    lines = []
    for rank, (actions, starts) in enumerate(zip(schedule.actions, timing.start, strict=True)):
        line = "|"
        for action, start in zip(actions, starts, strict=True):
            idle = int(start) * cell + 1 - len(line)
            if idle:
                line += "." * (idle - 1) + "|"
            line += str(action).ljust(int(durations.of(action.kind)) * cell - 1) + "|"
        lines.append(f"rank {rank:<{len(str(schedule.n_ranks - 1))}} {line}")
    return "\n".join(lines)
