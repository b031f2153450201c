"""A schedule drawn for a terminal: ranks against time, the middle left out where it would be too wide."""

from __future__ import annotations

from partitioner.schedules.clocks.unit_time import Durations, draw, simulate
from passes.ir.schedule import ActionKind, Schedule

_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward (two units)",
    ActionKind.BACKWARD_INPUT: "input gradients",
    ActionKind.BACKWARD_WEIGHT: "weight gradients",
}


def timetable(schedule: Schedule, width: int = 132, *, idle: bool = False) -> list[str]:
    """Return a line for each rank, and a last line that explains them.

    Args:
        width: letters of the longest line; a longer drawing keeps its beginning and its end.
        idle: also report the idle share in units of time; leave it out beside a predicted share, which differs.
    """
    drawn = draw(schedule).splitlines()
    longest = max(len(line) for line in drawn)
    lines = [line if len(line) == longest else f"{line:.<{longest - 1}}|" for line in drawn]
    label = lines[0].index("|")
    cell = max(len(str(action)) for action in schedule) + 1
    if longest > width:
        shown = (width - label - 5) // 2 // cell * cell
        lines = [f"{line[: label + shown]} ... {line[len(line) - shown - 1 :]}" for line in lines]
    kinds = {action.kind for action in schedule}
    words = ", ".join(f"{kind.value} {text}" for kind, text in _WORDS.items() if kind in kinds)
    share = f"; {100 * simulate(schedule, Durations()).bubble_fraction:.0f} % of the ranks' time is idle" if idle else ""
    return [*lines, f"a cell is a unit of time, as if every action took equally long; {words}{share}"]
