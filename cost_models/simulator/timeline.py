"""Timelines of computing, communication and memory for each device: simulated, or recorded from a run; as a trace or as a picture.

Slices of a run have the names of the simulation, so a prediction and a measurement can be compared. The picture is device
against time, light or dark as the page is:

    rank 0  |0F0|0F1|    |0B0|0F2|0B1| ...      computing, by kind; gaps are bubbles
             ====  ==                           communication below it
            ..--''--..--''--..                  memory, each device on the scale of the largest
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from cost_models.hardware.units import format_bytes, format_seconds
from cost_models.simulator.events import Slice
from cost_models.simulator.memory import MemoryCurve
from cost_models.svg import Colour, document, palette
from cost_models.text_files import write_text
from passes.ir.arguments.checked import checked_arguments

_MICRO = 1e6


@dataclass(frozen=True)
class Timeline:
    """Slices and memory of all devices.

    Attributes:
        title: ``"simulated"``, ``"measured"``.
        ranks: the devices that are shown; of many that do the same, one.
        computed: slices of computing: one for each action, as ``actions`` gathers nodes.
        communicated: slices of communication.
        memory: for each device bytes over time; empty where it was not recorded.
        step_time: seconds of the step, which ends a little after the last slice; 0: not known.
    """

    title: str
    ranks: tuple[int, ...]
    computed: tuple[Slice, ...]
    communicated: tuple[Slice, ...]
    memory: tuple[MemoryCurve, ...] = ()
    step_time: float = 0.0

    @property
    def end(self) -> float:
        """When the step ends, or if that is not known the last slice, in seconds."""
        return self.step_time or max((each.end for each in (*self.computed, *self.communicated)), default=0.0)

    def to_json(self, *others: Timeline) -> str:
        """Return Chrome's trace format for https://ui.perfetto.dev: a process for each device, threads for streams, memory as a counter.

        Args:
            others: timelines to show with this one.
        """
        events = [event for number, timeline in enumerate((self, *others)) for event in timeline.events(number)]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    @checked_arguments()
    def save(self, path: str | Path, *others: Timeline) -> None:
        """Write ``to_json`` to a file."""
        write_text(path, self.to_json(*others), "the timeline")

    def svg(self, *others: Timeline) -> str:
        """Draw device against time, communication below computing, memory as a curve.

        Args:
            others: timelines to draw below this one, on one scale of time.
        """
        return _draw((self, *others))

    def _repr_svg_(self) -> str:
        return self.svg()

    def events(self, number: int = 0) -> Iterator[dict[str, Any]]:
        """Chrome trace events; ``number`` identifies a timeline in its file."""
        shift = number * (max(self.ranks, default=0) + 1)
        for rank in self.ranks:
            process = shift + rank
            yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"rank {rank}, {self.title}"}}
            yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": rank * 2 + number}}
            for thread, name in ((0, "compute"), (1, "communication")):
                yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}
        for each in self.computed:
            yield self._slice(shift, 0, each, each.section or each.name)
        for each in self.communicated:
            yield self._slice(shift, 1, each, each.name)
        for rank, curve in zip(self.ranks, self.memory, strict=False):
            for time, size in zip(curve.times, curve.bytes, strict=True):
                yield {"ph": "C", "pid": shift + rank, "ts": time * _MICRO, "name": "memory", "args": {"bytes": size}}

    def _slice(self, shift: int, thread: int, each: Slice, name: str) -> dict[str, Any]:
        arguments = {"node": each.name, **({"bytes": each.bytes} if each.bytes else {})}
        return {
            "ph": "X",
            "pid": shift + each.rank,
            "tid": thread,
            "ts": each.start * _MICRO,
            "dur": (each.end - each.start) * _MICRO,
            "name": name,
            "cat": each.kind,
            "args": arguments,
        }


# -- the picture -------------------------------------------------------------------------------------------------------------------


_WIDTH, _LEFT, _RIGHT, _TOP, _FOOT = 1200, 110, 84, 62, 30
_ACTION = re.compile(r"\d+([FBIW])\d+")
_KINDS: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "O": "other computing",
    "C": "communication",
    "M": "memory",
}
_COLOURS: Mapping[str, Colour] = {
    "idle": ("#f1f3f5", "#23272d"),
    "F": ("#3b76b8", "#6ba3e0"),
    "B": ("#3a9168", "#5dbb8f"),
    "I": ("#77b894", "#9ad6b6"),
    "W": ("#b98a2c", "#dab25e"),
    "O": ("#8b93a0", "#7d8794"),
    "C": ("#cf5c3b", "#f08a68"),
    "M": ("#7a5ea8", "#b49bdf"),
    "on": ("#ffffff", "#10141a"),
}
"""Of kinds, of time in which nothing is computed, and of letters on a kind."""

_STYLE = f"""{palette("t", _COLOURS)}
.t text {{ font: 11px system-ui, sans-serif; fill: var(--ink) }} .t .f {{ fill: var(--faint) }}
.t .h {{ font-weight: 600; font-size: 13px }}
.t .n {{ fill: var(--on); font-size: 10px; text-anchor: middle }} .t .idle {{ fill: var(--idle) }} .t .paper {{ fill: var(--paper) }}
.t .axis {{ stroke: var(--line); stroke-width: 1 }} .t .m {{ fill: var(--M); fill-opacity: .22; stroke: var(--M); stroke-width: 1 }}
.t .F {{ fill: var(--F) }} .t .B {{ fill: var(--B) }} .t .I {{ fill: var(--I) }} .t .W {{ fill: var(--W) }} .t .O {{ fill: var(--O) }}
.t .C {{ fill: var(--C) }} .t .M {{ fill: var(--M) }}"""


@dataclass(frozen=True)
class _Row:
    """The heights of a device's row, in pixels."""

    compute: float
    communication: float
    memory: float
    gap: float

    @property
    def height(self) -> float:
        return self.compute + self.communication + self.memory + self.gap


_ROWS = ((8, _Row(22, 6, 18, 8)), (24, _Row(14, 4, 10, 4)), (64, _Row(8, 3, 7, 3)))
"""Up to how many devices, which rows."""

_SMALLEST = _Row(8, 2.5, 0, 2)


def _draw(timelines: Sequence[Timeline]) -> str:
    """Draw timelines on one scale of time, the rows of a device one below the other.

    Args:
        timelines: of equally many devices.
    """
    n_rows = sum(len(timeline.ranks) for timeline in timelines)
    row = next((row for most, row in _ROWS if n_rows <= most), _SMALLEST)
    if not any(timeline.memory for timeline in timelines):
        row = _Row(row.compute, row.communication, 0, row.gap)
    end = max((timeline.end for timeline in timelines), default=0.0) or 1.0
    height = _TOP + n_rows * row.height + _FOOT
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    largest = max((size for timeline in timelines for curve in timeline.memory for size in curve.bytes), default=0)
    parts = [
        f'<rect class="paper" width="{_WIDTH}" height="{height:.0f}"/>',
        *_heading(timelines),
        *_axis(end, scale, height),
    ]
    place = 0
    for rank in sorted({rank for timeline in timelines for rank in timeline.ranks}):
        for timeline in timelines:
            if rank in timeline.ranks:
                top = _TOP + place * row.height
                parts += _device(timeline, rank, row, top, scale, largest, label=_label(timelines, timeline, rank, row))
                place += 1
    return document("t", _WIDTH, height, f"timeline of {n_rows} devices", _STYLE, parts)


def _label(timelines: Sequence[Timeline], timeline: Timeline, rank: int, row: _Row) -> str:
    if row.height < 12 and rank % 4:
        return ""
    return f"rank {rank}" if len(timelines) == 1 else f"rank {rank} {timeline.title}"


def _heading(timelines: Sequence[Timeline]) -> Iterator[str]:
    """Yield the titles of the timelines, and the legend of colours."""
    words = ", ".join(f"{timeline.title} {format_seconds(timeline.end)}" for timeline in timelines)
    yield f'<text class="h" x="{_LEFT}" y="20">{escape(words)}</text>'
    seen = {_kind(each) for timeline in timelines for each in timeline.computed}
    seen |= {"C"} if any(timeline.communicated for timeline in timelines) else set()
    seen |= {"M"} if any(timeline.memory for timeline in timelines) else set()
    x = float(_LEFT)
    for kind, word in _KINDS.items():
        if kind in seen:
            yield f'<rect class="{kind}" x="{x:.0f}" y="31" width="10" height="10" rx="2"/>'
            yield f'<text class="f" x="{x + 14:.0f}" y="40">{word}</text>'
            x += 30 + 6.2 * len(word)
    yield f'<rect class="idle" x="{x:.0f}" y="31" width="10" height="10" rx="2"/><text class="f" x="{x + 14:.0f}" y="40">idle</text>'


def _axis(end: float, scale: float, height: float) -> Iterator[str]:
    """Yield marks at round times."""
    step = 10 ** math.floor(math.log10(end))
    step = next(step / part for part in (1, 2, 5, 10) if end / (step / part) >= 5)
    for index in range(int(end / step * (1 + 1e-9)) + 1):
        x = _LEFT + index * step * scale
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - _FOOT + 4:.0f}"/>'
        word = format_seconds(index * step) if index else "0"
        yield f'<text class="f" x="{x:.1f}" y="{height - 10:.0f}" text-anchor="middle">{word}</text>'


def _device(timeline: Timeline, rank: int, row: _Row, top: float, scale: float, largest: int, label: str) -> Iterator[str]:
    """Yield one device's row."""
    if label:
        yield f'<text x="{_LEFT - 8}" y="{top + row.compute / 2 + 4:.1f}" text-anchor="end">{escape(label)}</text>'
    width = timeline.end * scale
    yield f'<rect class="idle" x="{_LEFT}" y="{top:.1f}" width="{width:.1f}" height="{row.compute}"/>'
    computed = [each for each in timeline.computed if each.rank == rank]
    for each in _visible(computed, scale):
        x, wide = _LEFT + each.start * scale, (each.end - each.start) * scale
        title = f"<title>{escape(each.section or each.name)}: {format_seconds(each.end - each.start)}</title>"
        yield _box(_kind(each), x, top, wide, row.compute, title)
        if row.compute >= 14 and wide > 7 * len(each.section) and _ACTION.fullmatch(each.section):
            yield f'<text class="n" x="{x + wide / 2:.1f}" y="{top + row.compute / 2 + 3.5:.1f}">{each.section}</text>'
    below = top + row.compute + 1
    for each in _visible([each for each in timeline.communicated if each.rank == rank], scale):
        x, wide = _LEFT + each.start * scale, (each.end - each.start) * scale
        title = f"<title>{escape(each.name)}: {format_bytes(each.bytes)}, {format_seconds(each.end - each.start)}</title>"
        yield _box("C", x, below, wide, row.communication - 1, title)
    if row.memory and timeline.memory:
        yield from _memory(timeline.memory[list(timeline.ranks).index(rank)], below + row.communication, row.memory, scale, largest)


def _box(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    gap, least = 0.6 if width > 3 else 0.0, 0.8 if kind == "C" else 0.2
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{max(width - gap, least):.2f}" height="{height:.1f}">{title}</rect>'


def _memory(curve: MemoryCurve, top: float, height: float, scale: float, largest: int) -> Iterator[str]:
    """Yield the curve, and its peak in words."""
    if not curve.bytes or not largest:
        return
    bottom, points = top + height, []
    highest: dict[int, tuple[float, float]] = {}
    for time, size in zip(curve.times, curve.bytes, strict=True):
        x, y = _LEFT + time * scale, bottom - size / largest * (height - 2)
        pixel = int(x * 2)
        highest[pixel] = x, min(y, highest.get(pixel, (x, y))[1])
    last = bottom
    for x, y in highest.values():
        points += [f"{x:.1f},{last:.1f}", f"{x:.1f},{y:.1f}"]
        last = y
    edge = next(reversed(highest.values()))[0]
    yield f'<polygon class="m" points="{_LEFT},{bottom:.1f} {" ".join(points)} {edge:.1f},{bottom:.1f}"/>'
    yield f'<text class="f" x="{_WIDTH - _RIGHT + 6}" y="{bottom - 1:.1f}">{format_bytes(max(curve.bytes))}</text>'


def _visible(slices: Sequence[Slice], scale: float) -> list[Slice]:
    """Merge slices of one kind that are narrower than a pixel and close together."""
    found: list[Slice] = []
    for each in slices:
        last = found[-1] if found else None
        narrow = last is not None and (each.end - each.start) * scale < 0.7 and (each.start - last.end) * scale < 0.3
        if last is not None and narrow and _kind(last) == _kind(each):
            found[-1] = Slice(last.rank, last.name, last.section, last.start, each.end, last.kind, last.bytes + each.bytes)
        else:
            found.append(each)
    return found


def _kind(each: Slice) -> str:
    if each.kind != "compute":
        return "C"
    match = _ACTION.fullmatch(each.section)
    return match[1] if match else "O"
