"""A schedule drawn for a terminal: ranks against time, the middle left out where it would be too wide."""

from __future__ import annotations

from partitioner.schedules.unit_time import Durations, draw, simulate
from passes.ir.schedule import Schedule

__all__ = ["timetable"]


def timetable(schedule: Schedule, width: int = 132) -> list[str]:
    """One line a rank, and one that says how to read them.

    Args:
        width: longest line; a longer drawing keeps its beginning and its end.
    """
    drawn = draw(schedule).splitlines()
    timeline = simulate(schedule, Durations())
    longest = max(len(line) for line in drawn)
    lines = [line.ljust(longest) for line in drawn]
    label = lines[0].index("|")
    cell = max(len(str(action)) for action in schedule) + 1
    if longest > width:
        shown = (width - label - 5) // 2 // cell * cell
        lines = [f"{line[: label + shown]} ... {line[len(line) - shown - 1 :]}" for line in lines]
    halves = ", I input gradients, W weight gradients" if schedule.splits_backward else ""
    idle = f"{timeline.bubble_fraction:.0%} of the ranks' time is idle"
    return [*(line.rstrip() for line in lines), f"a cell is a unit of time; F forward, B backward (two units){halves}; {idle}"]
