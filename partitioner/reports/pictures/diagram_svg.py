"""A diagram as SVG, with nothing to install: a lane for each rank, time downwards, light or dark as the page is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from cost_models.svg import document, palette
from partitioner.reports.pictures.colours import LINKS, PLAIN, STAGES
from partitioner.reports.pictures.diagram import Arrow, Box, Diagram
from partitioner.reports.pictures.layers import Layers, arrange

_CELL, _BOX, _ROW, _HEIGHT = 158, 142, 70, 40
"""Distance of boxes in a row, width of a box, distance of rows, height of a box."""

_MARGIN, _TOP, _GAP = 16, 96, 22
"""Margin of the drawing, upper edge of the first row, gap between lanes."""

_BESIDE, _NARROWEST = 56, 420
"""Width beside the last lane for labels of messages to it; smallest width of a drawing."""

_TITLE_LETTER, _LABEL_LETTER, _LABEL_LINE = 7.6, 5.8, 12
"""Average width of a letter of the title, and of a label; height of a line of a label."""

_LONGEST = 22
"""Letters of a box's label; a longer label is truncated."""


def svg_style() -> str:
    """Return the CSS rules of drawings; classes ``s0``, ``s1``, ... fill boxes of stages."""
    named = {"plain": PLAIN, **LINKS, **{f"s{index}": colour for index, colour in enumerate(STAGES)}}
    fills = " ".join(f".d .s{index} {{ fill: var(--s{index}) }}" for index in range(len(STAGES)))
    links = " ".join(f".d .{kind} {{ stroke: var(--{kind}) }} .d .{kind}-fill {{ fill: var(--{kind}) }}" for kind in LINKS)
    return f"""{palette("d", named)}
.d text {{ font: 12px system-ui, sans-serif; fill: var(--ink) }} .d .c {{ text-anchor: middle }} .d .e {{ text-anchor: end }}
.d .f {{ fill: var(--faint); font-size: 10px }} .d .h {{ font-weight: 600; font-size: 13px }} .d .paper {{ fill: var(--paper) }}
.d .lane {{ fill: none; stroke: var(--line) }} .d .plain {{ fill: var(--plain) }} .d path.link {{ fill: none; stroke-width: 1.3 }}
.d path.message {{ stroke-width: 2.2 }} .d path.collective {{ stroke-width: 1.8; stroke-dasharray: 5 3 }}
.d .halo {{ paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round }}
{fills} {links}"""


def _width(label: str) -> float:
    return len(label) * _LABEL_LETTER


@dataclass(frozen=True)
class _Label:
    """Text beside an arrow; its part ``anchor`` is at the position (x, y) of the base line."""

    text: str
    x: float
    y: float
    anchor: Literal["start", "middle", "end"]

    @property
    def left(self) -> float:
        return self.x - _width(self.text) * {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor]

    def overlaps(self, other: _Label) -> bool:
        """Return whether two labels would cover each other."""
        return (
            abs(self.y - other.y) < _LABEL_LINE
            and self.left < other.left + _width(other.text)
            and other.left < self.left + _width(self.text)
        )

    def svg(self) -> str:
        """Return the SVG element."""
        kind = {"start": "f halo", "middle": "f halo c", "end": "f halo e"}[self.anchor]
        return f'<text class="{kind}" x="{self.x:.1f}" y="{self.y:.0f}">{escape(self.text)}</text>'


@dataclass(frozen=True)
class _Canvas:
    """A diagram with positions in pixels.

    Attributes:
        number: key of a box -> its index in ``diagram.boxes``.
        layers: row of each box, and place within the row of its lane.
        left: left edge of each lane.
    """

    diagram: Diagram
    number: Mapping[str, int]
    layers: Layers
    left: tuple[float, ...]

    def x(self, lane: int, place: float) -> float:
        """Return the middle of a place in a row of a lane."""
        return self.left[lane] + (place + 0.5) * _CELL

    def place(self, key: str) -> tuple[int, float, float]:
        """Return the lane of a box, and x and y of the middle of its upper edge."""
        index = self.number[key]
        lane = self.diagram.boxes[index].lane
        return lane, self.x(lane, self.layers.place[index]), _TOP + self.layers.row[index] * _ROW

    @property
    def widths(self) -> list[int]:
        """The width of each lane."""
        return [places * _CELL for places in self.layers.width]


def diagram_svg(diagram: Diagram) -> str:
    """Draw a diagram: each box in the lane of its rank, below the boxes that it reads from."""
    canvas, bends = _arrange(diagram)
    width, height = _page_size(canvas)
    # Later elements cover earlier ones: messages are drawn last.
    arrows = sorted(diagram.arrows, key=lambda arrow: ("data", "collective", "message").index(arrow.kind))
    parts = [
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text class="h" x="{_MARGIN}" y="22">{escape(diagram.title)}</text>',
        *_legend(diagram),
        *_lanes(canvas, height),
        *(_link(arrow, canvas, bends.get(id(arrow), ())) for arrow in arrows),
        *(_box(box, canvas) for box in diagram.boxes),
        *_labels(arrows, canvas),
    ]
    return document("d", width, height, diagram.title, svg_style(), parts)


def _arrange(diagram: Diagram) -> tuple[_Canvas, dict[int, Sequence[float]]]:
    """Place the boxes; also return id of an arrow -> the places that it passes in the rows between its ends.

    Arrows of collectives have no direction and do not order boxes. Boxes of no stage, the gradients of shared parameters, come last.
    """
    number = {box.key: index for index, box in enumerate(diagram.boxes)}
    directed = [arrow for arrow in diagram.arrows if arrow.kind != "collective"]
    edges = [(number[arrow.source], number[arrow.target]) for arrow in directed]
    last = [index for index, box in enumerate(diagram.boxes) if box.stage is None]
    layers = arrange([box.lane for box in diagram.boxes], edges, last)
    left = tuple(float(_MARGIN + sum(layers.width[:lane]) * _CELL + lane * _GAP) for lane in range(len(layers.width)))
    return _Canvas(diagram, number, layers, left), dict(zip([id(arrow) for arrow in directed], layers.bends, strict=True))


def _page_size(canvas: _Canvas) -> tuple[float, float]:
    """Return width and height: of the lanes or the title, and of the labels of messages to the last lane."""
    diagram, widths = canvas.diagram, canvas.widths
    lanes, title = sum(widths) + _GAP * (len(widths) - 1), len(diagram.title) * _TITLE_LETTER
    messages = [arrow for arrow in diagram.arrows if arrow.kind == "message"]
    reaches_last = any(canvas.place(arrow.target)[0] == len(widths) - 1 for arrow in messages)
    width = max(2 * _MARGIN + max(lanes, title), _NARROWEST) + (_BESIDE if reaches_last else 0)
    return width, _TOP + canvas.layers.n_rows * _ROW + _MARGIN


def _legend(diagram: Diagram) -> list[str]:
    """Explain the colours of stages and the strokes of arrows."""
    parts, x = [], float(_MARGIN)
    stages = sorted({box.stage for box in diagram.boxes if box.stage is not None})
    for stage in stages[: len(STAGES)]:
        parts.append(f'<rect class="s{stage}" x="{x:.0f}" y="34" width="12" height="12" rx="3"/>')
        parts.append(f'<text class="f" x="{x + 16:.0f}" y="44">stage {stage}</text>')
        x += 66
    for kind in ("message", "collective"):
        if any(arrow.kind == kind for arrow in diagram.arrows):
            parts.append(f'<path class="link {kind}" d="M{x:.0f},40 h24"/><text class="f" x="{x + 30:.0f}" y="44">{kind}</text>')
            x += 92
    if any("\u2191" in arrow.label for arrow in diagram.arrows):
        parts.append(f'<text class="f" x="{x:.0f}" y="44">\u2193 activations, \u2191 their gradients, in a step</text>')
    return parts


def _lanes(canvas: _Canvas, height: float) -> list[str]:
    parts = []
    for lane, left, width in zip(canvas.diagram.lanes, canvas.left, canvas.widths, strict=False):  # last lanes without boxes are not drawn
        parts.append(f'<rect class="lane" x="{left:.0f}" y="56" width="{width:.0f}" height="{height - 56 - 6:.0f}" rx="8"/>')
        parts.append(f'<text x="{left + 10:.0f}" y="72">{escape(lane.label)}</text>')
        parts.append(f'<text class="f" x="{left + 10:.0f}" y="85">{escape(lane.detail)}</text>')
    return parts


def _box(box: Box, canvas: _Canvas) -> str:
    """Draw a box with its label, a smaller line of detail and a tooltip."""
    _, x, y = canvas.place(box.key)
    fill = "plain" if box.stage is None else f"s{box.stage % len(STAGES)}"
    line = 24 if not box.detail else 17
    detail = f'<text class="c f" x="{x:.1f}" y="{y + 31:.0f}">{escape(_keep_end(box.detail, 26))}</text>' if box.detail else ""
    return (
        f"<g><title>{escape(box.tooltip)}</title>"
        f'<rect class="{fill}" x="{x - _BOX / 2:.1f}" y="{y:.0f}" width="{_BOX}" height="{_HEIGHT}" rx="7"/>'
        f'<text class="c" x="{x:.1f}" y="{y + line:.0f}">{escape(_keep_end(box.label, _LONGEST))}</text>{detail}</g>'
    )


def _keep_end(text: str, longest: int) -> str:
    """Truncate a long name at its beginning: the end is more specific."""
    return text if len(text) <= longest else f"…{text[1 - longest :]}"


def _link(arrow: Arrow, canvas: _Canvas, bends: Sequence[float]) -> str:
    """Draw an arrow: a collective as a curve between its boxes, others from row to row through the places ``bends``."""
    (lane, from_x, from_y), (other, to_x, to_y) = canvas.place(arrow.source), canvas.place(arrow.target)
    title = f"<title>{escape(arrow.tooltip)}</title>" if arrow.tooltip else ""
    if arrow.kind == "collective":
        ends = (from_x, from_y), (to_x, to_y)
        path = _path_between(*ends) if abs(lane - other) == 1 else _path_below(*ends)
        return f'<g>{title}<path class="link collective" d="{path}"/></g>'
    points = [(from_x, from_y + _HEIGHT)]
    for step, place in enumerate(bends):
        x, top = canvas.x(lane, place), from_y + (1 + step) * _ROW
        points += [(x, top), (x, top + _HEIGHT)]
    points.append((to_x, to_y))
    curve = [f"M{points[0][0]:.1f},{points[0][1]:.0f}"]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        curve.append(f"L{x1:.1f},{y1:.0f}" if x0 == x1 else f"C{x0:.1f},{middle:.0f} {x1:.1f},{middle:.0f} {x1:.1f},{y1:.0f}")
    head = f'<path class="{arrow.kind}-fill" d="M{to_x:.1f},{to_y:.0f} l-4,-7 h8 z"/>'
    return f'<g>{title}<path class="link {arrow.kind}" d="{"".join(curve)}"/>{head}</g>'


def _path_between(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return a path from the right side of one box to the left side of another; both given by the middle of their upper edges."""
    x0, x1, y0, y1 = start[0] + _BOX / 2, end[0] - _BOX / 2, start[1] + _HEIGHT / 2, end[1] + _HEIGHT / 2
    middle = (x0 + x1) / 2
    return f"M{x0:.1f},{y0:.0f}C{middle:.1f},{y0:.0f} {middle:.1f},{y1:.0f} {x1:.1f},{y1:.0f}"


def _path_below(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return a path from box to box that passes below the boxes of the lanes in between."""
    (x0, y0), (x1, y1) = start, end
    deepest = max(y0, y1) + _HEIGHT + 20
    return f"M{x0 + 20:.1f},{y0 + _HEIGHT:.0f}C{x0 + 30:.1f},{deepest:.0f} {x1 - 30:.1f},{deepest:.0f} {x1 - 20:.1f},{y1 + _HEIGHT:.0f}"


def _labels(arrows: Sequence[Arrow], canvas: _Canvas) -> list[str]:
    """Place the labels of arrows without overlaps: at the first free candidate, else above the first candidate, line by line."""
    placed: list[_Label] = []

    def is_free(label: _Label) -> bool:
        return not any(label.overlaps(other) for other in placed)

    for arrow in arrows:
        if arrow.label:
            candidates = _label_candidates(arrow, canvas)
            label = next(filter(is_free, candidates), candidates[0])
            while not is_free(label):
                label = dataclasses.replace(label, y=label.y - _LABEL_LINE)
            placed.append(label)
    return [label.svg() for label in placed]


def _label_candidates(arrow: Arrow, canvas: _Canvas) -> list[_Label]:
    """Return the positions of a label, the best first: beside either end of a message, above a collective."""
    (lane, from_x, from_y), (other, to_x, to_y) = canvas.place(arrow.source), canvas.place(arrow.target)
    if arrow.kind == "message":
        labels: list[_Label] = []
        for x, y in ((to_x, to_y - 17), (from_x, from_y + _HEIGHT + 20)):
            labels += [_Label(arrow.label, x + 8, y, "start"), _Label(arrow.label, x - 8, y, "end")]
        return [label for label in labels if label.left >= 0]
    to_y += 0 if abs(lane - other) == 1 else _HEIGHT + 26
    return [_Label(arrow.label, (from_x + to_x) / 2, to_y - 5, "middle")]
