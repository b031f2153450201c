"""Lines or points over two axes as SVG, with nothing to install: linear or logarithmic, light or dark as the page is.

seconds |  o
        |    `-o----o       every point says its numbers to the pointer; series are told apart by colour and mark
        +------------
           2    4   8  devices
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from cost_models.svg import Colour, document, palette

__all__ = ["COLOURS", "Axis", "Picture", "Series", "chart_svg"]

COLOURS: tuple[Colour, ...] = (
    ("#2f6db3", "#6ba3e0"),
    ("#c4502e", "#f08a68"),
    ("#2c855c", "#5dbb8f"),
    ("#7a5ea8", "#b49bdf"),
    ("#a5771c", "#dab25e"),
    ("#b0447a", "#e68ab4"),
    ("#2b8a99", "#63c1cf"),
    ("#6b7280", "#9aa3ae"),
)
"""Of series, light and dark; further ones repeat them with another mark."""

_MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f"M{x - 4:.1f},{y:.1f} a4,4 0 1 0 8,0 a4,4 0 1 0 -8,0",
    lambda x, y: f"M{x - 4:.1f},{y - 4:.1f} h8 v8 h-8 z",
    lambda x, y: f"M{x:.1f},{y - 5:.1f} l5,9 h-10 z",
)
"""Circle, square, triangle, as paths."""

_WIDTH, _PLOT, _LEFT, _TOP, _RIGHT = 520, 220, 74, 38, 16
_LEGEND_LINE, _LEGEND_LETTER = 18, 6.6
_TICKS = 5
"""About as many ticks as an axis has room for."""


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what it measures, with the unit if ``written`` has none.
        written: a value as text.
        logarithmic: equal steps are equal factors.
        ticks: where to write values; empty: at round ones.
        least: the axis begins here at the latest; None: where values do.
        binary: round values are powers of two, as of bytes.
    """

    label: str
    written: Callable[[float], str]
    logarithmic: bool = False
    ticks: Sequence[float] = ()
    least: float | None = None
    binary: bool = False

    @property
    def title(self) -> str:
        """The label, with the scale where it is not linear."""
        return f"{self.label} (log scale)" if self.logarithmic else self.label


@dataclass(frozen=True)
class Series:
    """What one colour shows.

    Attributes:
        name: for the legend.
        points: (x, y, what the pointer reads), in order of x.
        colour: its place in ``COLOURS``.
        joined: whether a line joins the points.
        stepped: whether that line goes first across, then down, as the edge of what can be had.
        marked: whether points have marks.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    colour: int
    joined: bool = True
    stepped: bool = False
    marked: bool = True


class Picture(str):
    """The text of a picture as SVG, which a notebook shows."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def __call__(self, value: float) -> float:
        low, high, here = (math.log(each) for each in (self.low, self.high, value)) if self.logarithmic else (self.low, self.high, value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)


def chart_svg(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """The picture; nothing where there is nothing to draw."""
    series = [each for each in series if each.points]
    if not series:
        return ""
    across = _scale(x, [point[0] for each in series for point in each.points], _LEFT + 12, _WIDTH - _RIGHT - 12)
    up = _scale(y, [point[1] for each in series for point in each.points], _TOP + _PLOT, _TOP)
    legend = _legend(series)
    height = _TOP + _PLOT + 44 + legend.count("<g") * _LEGEND_LINE
    heading = f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>'
    drawn = (part for each in series for part in _drawn(each, across, up))
    return document("chart", _WIDTH, height, title, _STYLE, [heading, *_axes(x, y, across, up), *drawn, legend])


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    low, high = min([*values, *axis.ticks]), max([*values, *axis.ticks])
    assert low > 0 or not axis.logarithmic
    low = low if axis.least is None else min(low, axis.least)
    if axis.logarithmic:
        pad = 1.25 if not axis.ticks or low == high else 1.0
        return _Scale(low / pad, high * pad, start, end, logarithmic=True)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return _Scale(low if axis.least == low else low - room, high + room, start, end, logarithmic=False)


def _ticks(axis: Axis, scale: _Scale) -> list[float]:
    """Round values inside a scale: of a logarithmic one, as few of 1, 2 and 5 times powers of ten as the room asks for."""
    if axis.ticks:
        return list(axis.ticks)
    if axis.binary and axis.logarithmic:
        powers = [2.0**power for power in range(math.ceil(math.log2(scale.low)), math.floor(math.log2(scale.high)) + 1)]
        return powers[:: -(-len(powers) // (2 * _TICKS))] if len(powers) > 1 else [scale.low, scale.high]
    if axis.logarithmic:
        tens = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
            found = [step * 10.0**power for power in tens for step in steps if scale.low <= step * 10.0**power <= scale.high]
            if len(found) >= 3:
                return found[:: -(-len(found) // (2 * _TICKS))]
        return [scale.low, scale.high]
    rough = (scale.high - scale.low) / _TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    first = math.ceil(scale.low / step)
    return [index * step for index in range(first, math.floor(scale.high / step) + 1)]


def _axes(x: Axis, y: Axis, across: _Scale, up: _Scale) -> list[str]:
    bottom, right = _TOP + _PLOT, _WIDTH - _RIGHT
    parts = []
    for value in _ticks(y, up):
        at = up(value)
        parts.append(f'<path class="grid" d="M{_LEFT},{at:.1f} H{right}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{at + 3.5:.1f}">{escape(y.written(value))}</text>')
    values = _ticks(x, across)
    parts += [f'<text class="tick middle" x="{across(value):.1f}" y="{bottom + 16}">{escape(x.written(value))}</text>' for value in values]
    parts.append(f'<path class="axis" d="M{_LEFT},{bottom} H{right}"/>')
    parts.append(f'<text class="tick end" x="{right}" y="{bottom + 32}">{escape(x.title)}</text>')
    parts.append(f'<text class="tick" x="{_LEFT}" y="{_TOP - 8}">{escape(y.title)}</text>')
    return parts


def _drawn(series: Series, across: _Scale, up: _Scale) -> list[str]:
    places = [(across(x), up(y)) for x, y, _ in series.points]
    kind = f"c{series.colour % len(COLOURS)}"
    parts = []
    if series.joined and len(places) > 1:
        steps = [f"H{x:.1f} V{y:.1f}" if series.stepped else f"L{x:.1f},{y:.1f}" for x, y in places[1:]]
        parts.append(f'<path class="line {kind}" d="M{places[0][0]:.1f},{places[0][1]:.1f} {" ".join(steps)}"/>')
    if series.marked:
        mark = _MARKS[series.colour // len(COLOURS) % len(_MARKS)]
        told = zip(places, series.points, strict=True)
        parts += [f'<path class="mark {kind}" d="{mark(*place)}"><title>{escape(text)}</title></path>' for place, (_, _, text) in told]
    return parts


def _legend(series: Sequence[Series]) -> str:
    """Marks and names, in as many lines as they need."""
    lines: list[list[str]] = [[]]
    at, y = float(_LEFT), _TOP + _PLOT + 52
    for each in series:
        wide = 26 + len(each.name) * _LEGEND_LETTER
        if at + wide > _WIDTH and lines[-1]:
            lines.append([])
            at, y = float(_LEFT), y + _LEGEND_LINE
        mark = _MARKS[each.colour // len(COLOURS) % len(_MARKS)]
        kind = f"c{each.colour % len(COLOURS)}"
        shape = f'class="mark {kind}" d="{mark(at + 4, y - 4)}"' if each.marked else f'class="line {kind}" d="M{at},{y - 4} h12"'
        lines[-1].append(f'<path {shape}/><text class="tick" x="{at + 16:.1f}" y="{y}">{escape(each.name)}</text>')
        at += wide
    return "".join(f"<g>{''.join(line)}</g>" for line in lines)


def _style() -> str:
    names = [f"c{index}" for index in range(len(COLOURS))]
    kinds = " ".join(f".chart .mark.{name} {{ fill: var(--{name}) }} .chart .line.{name} {{ stroke: var(--{name}) }}" for name in names)
    return f"""{palette("chart", dict(zip(names, COLOURS, strict=True)))}
.chart text {{ font: 11px system-ui, sans-serif; fill: var(--faint) }}
.chart .title {{ fill: var(--ink); font-size: 13px; font-weight: 600 }}
.chart .middle {{ text-anchor: middle }} .chart .end {{ text-anchor: end }}
.chart .grid {{ stroke: var(--line); fill: none }} .chart .axis {{ stroke: var(--faint); fill: none }}
.chart .line {{ fill: none; stroke-width: 1.8 }} .chart .mark {{ stroke: var(--paper); stroke-width: 1.2 }}
{kinds}"""


_STYLE = _style()
