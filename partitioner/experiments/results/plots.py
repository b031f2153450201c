"""Plots of a sweep: time and efficiency against devices, memory against microbatches, the Pareto front of time and memory.

A plot shows the placements of one model on one machine. A colour stands for the dimensions of a mesh of any size, ``pipeline x data``, and
shows the best of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from cost_models.hardware.units import format_bytes, format_seconds
from partitioner.experiments.results.pareto import pareto_front
from partitioner.experiments.results.row import Row
from partitioner.options.mode import parse_mode
from partitioner.reports.pictures.chart import Axis, Series, chart_svg


def family(row: Row) -> str:
    """Return the dimensions of a placement's mesh, without their sizes.

    >>> family(Row("", "net", 8, "pipeline=2,data=4", "h100"))
    'pipeline x data'
    """
    mode = parse_mode(row.mode)
    return mode if isinstance(mode, str) else " x ".join(mode)


def _families(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by family; families with fewer dimensions come first."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (family(row).count(" x "), family(row))):
        groups.setdefault(family(row), []).append(row)
    return groups


def best_at_each(rows: Iterable[Row], x: Callable[[Row], float], cost: Callable[[Row], float]) -> list[Row]:
    """Return the row of the lowest cost for each value of ``x``, in ascending order of ``x``."""
    best: dict[float, Row] = {}
    for row in sorted(rows, key=cost):
        best.setdefault(x(row), row)
    return [best[value] for value in sorted(best)]


def _tooltip(row: Row) -> str:
    schedule = f"{row.schedule}, " if row.schedule != "none" else ""
    count = f"{row.n_microbatches} microbatch{'es' if row.n_microbatches != 1 else ''}"
    facts = [f"{row.model}, {row.mesh or row.mode} on {row.devices} x {row.cluster}", f"{schedule}{count}"]
    return "; ".join([*facts, f"{format_seconds(_time(row))} a step", f"{format_bytes(_memory(row))} at the peak"])


_time: Callable[[Row], float] = operator.attrgetter("step_time")
_memory: Callable[[Row], float] = operator.attrgetter("peak_memory")
_devices: Callable[[Row], float] = operator.attrgetter("devices")


def _microbatches(row: Row) -> float:
    return row.n_microbatches or 1


def _counts(label: str, values: Iterable[float]) -> Axis:
    return Axis(label, "{:g}".format, logarithmic=True, ticks=tuple(sorted(set(values))))


def _lines(rows: Iterable[Row], x: Callable[[Row], float], cost: Callable[[Row], float], y: Callable[[Row], float]) -> list[Series]:
    """Return a line for each family, through ``(x, y)`` of its row of the lowest cost at each ``x``."""
    return [
        Series(name, [(x(row), y(row), _tooltip(row)) for row in best_at_each(members, x, cost)], colour)
        for colour, (name, members) in enumerate(_families(rows).items())
    ]


def time_plot(rows: Sequence[Row]) -> str:
    """Plot step time against devices: the fastest placement of each family."""
    return chart_svg(
        "Step time against devices",
        _counts("devices", map(_devices, rows)),
        Axis("a step takes", format_seconds, logarithmic=True),
        _lines(rows, _devices, _time, _time),
    )


def efficiency_plot(rows: Sequence[Row]) -> str:
    """Plot scaling efficiency against devices: the speed per device, relative to the fastest placement on the fewest devices."""
    fewest = min((row.devices for row in rows), default=0)
    device_seconds = min((_time(row) * fewest for row in rows if row.devices == fewest), default=0.0)
    return chart_svg(
        f"Scaling efficiency, against the best on {fewest} devices",
        _counts("devices", map(_devices, rows)),
        Axis("of linear speed-up", lambda part: f"{part:.0%}", least=0.0),
        _lines(rows, _devices, _time, lambda row: device_seconds / (_time(row) * row.devices)),
    )


def memory_plot(rows: Sequence[Row]) -> str:
    """Plot peak memory against microbatches: the placement of each family with the least memory.

    Rows are those on the number of devices with the most numbers of microbatches; of several such numbers, on the largest.
    """
    tried: dict[int, set[float]] = {}  # devices -> numbers of microbatches
    for row in rows:
        tried.setdefault(row.devices, set()).add(_microbatches(row))
    shown_devices = max(tried, key=lambda devices: (len(tried[devices]), devices), default=0)
    shown = [row for row in rows if row.devices == shown_devices]
    return chart_svg(
        f"Peak memory against microbatches, on {shown_devices} devices",
        _counts("microbatches", map(_microbatches, shown)),
        Axis("the fullest device holds", format_bytes, logarithmic=True, binary=True),
        _lines(shown, _microbatches, _memory, _memory),
    )


def pareto_plot(rows: Sequence[Row]) -> str:
    """Plot peak memory against step time of all placements, and their Pareto front."""
    points = {name: [(_time(row), _memory(row), _tooltip(row)) for row in members] for name, members in _families(rows).items()}
    series = [Series(name, members, colour, joined=False) for colour, (name, members) in enumerate(points.items())]
    front = [(_time(row), _memory(row), "") for row in pareto_front(rows, ("step_time", "peak_memory"))]
    return chart_svg(
        "Peak memory against step time",
        Axis("a step takes", format_seconds, logarithmic=True),
        Axis("the fullest device holds", format_bytes, logarithmic=True, binary=True),
        [Series("front", front, _GREY, stepped=True, marked=False), *series],
    )


_GREY = 7

PLOTS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "time": time_plot,
    "efficiency": efficiency_plot,
    "memory": memory_plot,
    "pareto": pareto_plot,
}
"""Name -> function that draws the plot; it returns an empty text if there are no rows."""
