"""A diagram in the DOT language of Graphviz: a cluster for each rank, boxes coloured by stage."""

from __future__ import annotations

from partitioner.reports.pictures.colours import LINKS, stage_colour
from partitioner.reports.pictures.diagram import Arrow, Box, Diagram


def dot_text(diagram: Diagram) -> str:
    """Return a diagram as a ``digraph``, for ``dot -Tsvg``."""
    lines = [
        "digraph {",
        f"  label={_quoted(diagram.title)} labelloc=t fontname=Helvetica fontsize=13 compound=true",
        "  node [shape=box style=filled fontname=Helvetica fontsize=11 color=white]",
        "  edge [fontname=Helvetica fontsize=9]",
    ]
    for index, lane in enumerate(diagram.lanes):
        lines += [
            f"  subgraph cluster_{index} {{",
            f"    label={_quoted(chr(10).join(part for part in (lane.label, lane.detail) if part))} color={_quoted('#d7dbe0')}",
        ]
        lines += [f"    {_box(box)}" for box in diagram.boxes if box.lane == index]
        lines.append("  }")
    return "\n".join([*lines, *(f"  {_arrow(arrow)}" for arrow in diagram.arrows), "}"]) + "\n"


def _box(box: Box) -> str:
    label = "\n".join(part for part in (box.label, box.detail) if part)
    return f"{_quoted(box.key)} [label={_quoted(label)} fillcolor={_quoted(stage_colour(box.stage)[0])} tooltip={_quoted(box.tooltip)}]"


def _arrow(arrow: Arrow) -> str:
    style = {"data": "", "message": " penwidth=2", "collective": " style=dashed dir=both constraint=false"}[arrow.kind]
    label = f" label={_quoted(arrow.label)} tooltip={_quoted(arrow.tooltip)}" if arrow.label else ""
    return f"{_quoted(arrow.source)} -> {_quoted(arrow.target)} [color={_quoted(LINKS[arrow.kind][0])}{label}{style}]"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
