"""What a sweep found, as pictures: time and efficiency against devices, memory against microbatches, what cannot be had faster and smaller.

Placements of one model on one machine share a picture. A colour stands for the dimensions of a mesh (``pipeline x data``) whatever their
sizes, and shows the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from cost_models.hardware.units import format_bytes, format_seconds
from partitioner.experiments.results.row import Row
from partitioner.options.mode import parse_mode
from partitioner.reports.pictures.chart import Axis, Series, chart_svg

__all__ = ["PLOTS", "efficiency_plot", "family", "memory_plot", "pareto_front", "pareto_plot", "time_plot"]


def family(row: Row) -> str:
    """The dimensions of a placement's mesh, without their sizes.

    >>> family(Row("", "net", 8, "pipeline=2,data=4", "h100"))
    'pipeline x data'
    """
    mode = parse_mode(row.mode)
    return mode if isinstance(mode, str) else " x ".join(mode)


def _families(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda each: (family(each).count(" x "), family(each))):
        found.setdefault(family(row), []).append(row)
    return found


def _least(rows: Iterable[Row], by: Callable[[Row], float], number: Callable[[Row], float]) -> list[Row]:
    """For each value the row in which a number is least, in order of the values."""
    best: dict[float, Row] = {}
    for row in rows:
        value = by(row)
        if value not in best or number(row) < number(best[value]):
            best[value] = row
    return [best[value] for value in sorted(best)]


def _told(row: Row) -> str:
    """What the pointer reads."""
    facts = [f"{row.model}, {row.mode} on {row.devices} x {row.cluster}", f"{row.schedule}, {row.n_microbatches} microbatches"]
    return "; ".join([*facts, f"{format_seconds(_time(row))} a step", f"{format_bytes(_memory(row))} at the peak"])


def _time(row: Row) -> float:
    assert row.step_time is not None
    return row.step_time


def _memory(row: Row) -> float:
    assert row.peak_memory is not None
    return row.peak_memory


def _devices(row: Row) -> float:
    return row.devices


def _microbatches(row: Row) -> float:
    return row.n_microbatches or 1


def _counts(label: str, values: Iterable[float]) -> Axis:
    return Axis(label, "{:g}".format, logarithmic=True, ticks=tuple(sorted(set(values))))


def _lines(rows: Iterable[Row], by: Callable[[Row], float], least: Callable[[Row], float], up: Callable[[Row], float]) -> list[Series]:
    """A line for each family: for each value across, the row in which a number is least, and what is drawn of it."""
    return [
        Series(name, [(by(row), up(row), _told(row)) for row in _least(each, by, least)], colour)
        for colour, (name, each) in enumerate(_families(rows).items())
    ]


def time_plot(rows: Sequence[Row]) -> str:
    """Step time against devices: the fastest placement of each family."""
    return chart_svg(
        "Step time against devices",
        _counts("devices", map(_devices, rows)),
        Axis("a step takes", format_seconds, logarithmic=True),
        _lines(rows, _devices, _time, _time),
    )


def efficiency_plot(rows: Sequence[Row]) -> str:
    """Which part of the devices' speed arrives: 1 where n times the devices are n times as fast as the best on the fewest."""
    fewest = min((row.devices for row in rows), default=0)
    one = min((_time(row) * fewest for row in rows if row.devices == fewest), default=0.0)
    return chart_svg(
        f"Scaling efficiency, against the best on {fewest} devices",
        _counts("devices", map(_devices, rows)),
        Axis("of linear speed-up", lambda part: f"{part:.0%}", least=0.0),
        _lines(rows, _devices, _time, lambda row: one / (_time(row) * row.devices)),
    )


def memory_plot(rows: Sequence[Row]) -> str:
    """Peak memory against microbatches: the smallest placement of each family, where most numbers of microbatches were tried.

    Of several numbers of devices with equally many, it is the largest.
    """
    counts: dict[int, set[float]] = {}
    for row in rows:
        counts.setdefault(row.devices, set()).add(_microbatches(row))
    shown_devices = max(counts, key=lambda devices: (len(counts[devices]), devices), default=0)
    shown = [row for row in rows if row.devices == shown_devices]
    return chart_svg(
        f"Peak memory against microbatches, on {shown_devices} devices",
        _counts("microbatches", map(_microbatches, shown)),
        Axis("the fullest device holds", format_bytes, logarithmic=True, binary=True),
        _lines(shown, _microbatches, _memory, _memory),
    )


def pareto_front(rows: Iterable[Row]) -> list[Row]:
    """The rows that no other beats in both time and memory, fastest first."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda each: (_time(each), _memory(each), each.key)):
        if not front or _memory(row) < _memory(front[-1]):
            front.append(row)
    return front


def pareto_plot(rows: Sequence[Row]) -> str:
    """Step time against peak memory, and the front of what is best in both."""
    front = pareto_front(rows)
    points = {name: [(_time(row), _memory(row), _told(row)) for row in each] for name, each in _families(rows).items()}
    series = [Series(name, each, colour, joined=False) for colour, (name, each) in enumerate(points.items())]
    edge = [(_time(row), _memory(row), "") for row in front]
    return chart_svg(
        "Peak memory against step time",
        Axis("a step takes", format_seconds, logarithmic=True),
        Axis("the fullest device holds", format_bytes, logarithmic=True, binary=True),
        [Series("front", edge, _GREY, stepped=True, marked=False), *series],
    )


_GREY = 7

PLOTS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "time": time_plot,
    "efficiency": efficiency_plot,
    "memory": memory_plot,
    "pareto": pareto_plot,
}
"""Every picture of a sweep by name."""
