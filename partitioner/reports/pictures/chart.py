"""Lines or points over two axes as SVG, with nothing to install: linear or logarithmic, light or dark as the page is.

seconds |  o
        |    `-o----o       every point has a tooltip; series differ in colour and mark
        +------------
           2    4   8  devices
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from cost_models.svg import Colour, document, palette

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
"""The colours of series, light and dark; further series repeat them with another mark."""

_MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f"M{x - 4:.1f},{y:.1f} a4,4 0 1 0 8,0 a4,4 0 1 0 -8,0",
    lambda x, y: f"M{x - 4:.1f},{y - 4:.1f} h8 v8 h-8 z",
    lambda x, y: f"M{x:.1f},{y - 5:.1f} l5,9 h-10 z",
)
"""Circle, square, triangle, as paths."""

_WIDTH, _PLOT, _LEFT, _TOP, _RIGHT = 520, 220, 74, 38, 16
_LEGEND_LINE, _LETTER = 18, 6.6
_TICKS = 5
"""Approximate number of ticks of an axis."""


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: the quantity, with the unit if ``written`` has none.
        written: formats a value.
        logarithmic: whether the scale is logarithmic.
        ticks: the values with a tick; empty: round values.
        least: the axis begins at this value or below; None: at the smallest value.
        binary: whether round values are powers of two, as for bytes.
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
    """Points of one colour.

    Attributes:
        name: its name in the legend.
        points: (x, y, tooltip), in order of x.
        colour: index into ``COLOURS``.
        joined: whether a line joins the points.
        stepped: whether that line consists of steps, first horizontal, then vertical, as for a Pareto front.
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
    """Maps the values from ``low`` to ``high`` to the pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def chart_svg(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Draw a chart as SVG; return an empty text if no series has points."""
    series = [one for one in series if one.points]
    if not series:
        return ""
    points = [point for one in series for point in one.points]
    x_scale = _scale(x, [point[0] for point in points], _LEFT + 12, _WIDTH - _RIGHT - 12)
    y_scale = _scale(y, [point[1] for point in points], _TOP + _PLOT, _TOP)
    legend = _legend(series)
    height = _TOP + _PLOT + 44 + legend.count("<g") * _LEGEND_LINE
    heading = f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>'
    lines_and_marks = (element for one in series for element in _series_elements(one, x_scale, y_scale))
    return document("chart", _WIDTH, height, title, _style(), [heading, *_axes(x, y, x_scale, y_scale), *lines_and_marks, legend])


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    """Return the scale that maps the values, with some room around them, to the pixels from ``start`` to ``end``."""
    low, high = min([*values, *axis.ticks]), max([*values, *axis.ticks])
    assert low > 0 or not axis.logarithmic
    low = low if axis.least is None else min(low, axis.least)
    if axis.logarithmic:
        pad = 1.25 if not axis.ticks or low == high else 1.0
        return _Scale(low / pad, high * pad, start, end, logarithmic=True)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return _Scale(low if axis.least == low else low - room, high + room, start, end, logarithmic=False)


def _ticks(axis: Axis, scale: _Scale) -> list[float]:
    """Return the values of the ticks of an axis, in ascending order."""
    if axis.ticks:
        return list(axis.ticks)
    if axis.logarithmic:
        return _logarithmic_ticks(scale, binary=axis.binary)
    rough = (scale.high - scale.low) / _TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    first = math.ceil(scale.low / step)
    return [index * step for index in range(first, math.floor(scale.high / step) + 1)]


def _logarithmic_ticks(scale: _Scale, *, binary: bool) -> list[float]:
    """Return at most ``2 * _TICKS`` powers of two, or numbers like 1, 10, 100 or 1, 3, 10, 30; the ends if too few are in the scale."""
    if binary:
        powers = [2.0**power for power in range(math.ceil(math.log2(scale.low)), math.floor(math.log2(scale.high)) + 1)]
        return _thin_out(powers) if len(powers) > 1 else [scale.low, scale.high]
    tens = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        numbers = [digit * 10.0**power for power in tens for digit in digits]
        inside = [number for number in numbers if scale.low <= number <= scale.high]
        if len(inside) >= 3:
            return _thin_out(inside)
    return [scale.low, scale.high]


def _thin_out(values: list[float]) -> list[float]:
    """Keep every n-th value, with the smallest n that leaves at most ``2 * _TICKS``."""
    return values[:: math.ceil(len(values) / (2 * _TICKS))]


def _axes(x: Axis, y: Axis, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    """Draw the ticks of both axes, horizontal grid lines, the x axis, and the titles."""
    bottom, right = _TOP + _PLOT, _WIDTH - _RIGHT
    parts = []
    for value in _ticks(y, y_scale):
        height = y_scale(value)
        parts.append(f'<path class="grid" d="M{_LEFT},{height:.1f} H{right}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{height + 3.5:.1f}">{escape(y.written(value))}</text>')
    marks = _without_overlap([(x_scale(value), x.written(value)) for value in _ticks(x, x_scale)])
    parts += [f'<text class="tick middle" x="{place:.1f}" y="{bottom + 16}">{escape(text)}</text>' for place, text in marks]
    parts.append(f'<path class="axis" d="M{_LEFT},{bottom} H{right}"/>')
    parts.append(f'<text class="tick end" x="{right}" y="{bottom + 32}">{escape(x.title)}</text>')
    parts.append(f'<text class="tick" x="{_LEFT}" y="{_TOP - 8}">{escape(y.title)}</text>')
    return parts


def _without_overlap(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the labels of the x axis, centred at their places, without those that reach into the one before."""
    kept, end = list[tuple[float, str]](), -math.inf
    for place, text in labels:
        half = (len(text) + 1) * _LETTER / 2
        if place - half >= end:
            kept.append((place, text))
            end = place + half
    return kept


def _series_elements(series: Series, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    """Draw the line of a series, then its marks with their tooltips."""
    places = [(x_scale(x), y_scale(y)) for x, y, _ in series.points]
    kind = f"c{series.colour % len(COLOURS)}"
    parts = []
    if series.joined and len(places) > 1:
        steps = [f"H{x:.1f} V{y:.1f}" if series.stepped else f"L{x:.1f},{y:.1f}" for x, y in places[1:]]
        parts.append(f'<path class="line {kind}" d="M{places[0][0]:.1f},{places[0][1]:.1f} {" ".join(steps)}"/>')
    if series.marked:
        mark = _MARKS[series.colour // len(COLOURS) % len(_MARKS)]
        for place, (_, _, tooltip) in zip(places, series.points, strict=True):
            parts.append(f'<path class="mark {kind}" d="{mark(*place)}"><title>{escape(tooltip)}</title></path>')
    return parts


def _legend(series: Sequence[Series]) -> str:
    """Draw marks and names of the series; a line that is full continues in the next. One ``<g>`` a line."""
    lines: list[list[str]] = [[]]
    x, y = float(_LEFT), _TOP + _PLOT + 52
    for one in series:
        width = 26 + len(one.name) * _LETTER
        if x + width > _WIDTH and lines[-1]:
            lines.append([])
            x, y = float(_LEFT), y + _LEGEND_LINE
        mark = _MARKS[one.colour // len(COLOURS) % len(_MARKS)]
        kind = f"c{one.colour % len(COLOURS)}"
        shape = f'class="mark {kind}" d="{mark(x + 4, y - 4)}"' if one.marked else f'class="line {kind}" d="M{x},{y - 4} h12"'
        lines[-1].append(f'<path {shape}/><text class="tick" x="{x + 16:.1f}" y="{y}">{escape(one.name)}</text>')
        x += width
    return "".join(f"<g>{''.join(line)}</g>" for line in lines)


def _style() -> str:
    """Return the CSS rules of a chart; classes ``c0``, ``c1``, ... are the colours of series."""
    names = [f"c{index}" for index in range(len(COLOURS))]
    kinds = " ".join(f".chart .mark.{name} {{ fill: var(--{name}) }} .chart .line.{name} {{ stroke: var(--{name}) }}" for name in names)
    return f"""{palette("chart", dict(zip(names, COLOURS, strict=True)))}
.chart text {{ font: 11px system-ui, sans-serif; fill: var(--faint) }}
.chart .title {{ fill: var(--ink); font-size: 13px; font-weight: 600 }}
.chart .middle {{ text-anchor: middle }} .chart .end {{ text-anchor: end }}
.chart .grid {{ stroke: var(--line); fill: none }} .chart .axis {{ stroke: var(--faint); fill: none }}
.chart .line {{ fill: none; stroke-width: 1.8 }} .chart .mark {{ stroke: var(--paper); stroke-width: 1.2 }}
{kinds}"""
