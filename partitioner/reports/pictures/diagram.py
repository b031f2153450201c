"""A graph over several ranks, ready to be drawn: boxes in lanes, and arrows between them.

rank 0            rank 1
[ token ]
    |
[ blocks.0 ] ===> [ blocks.1 ]        === message        - - collective
                       |
                  [  head    ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Arrow", "ArrowKind", "Box", "Diagram", "Lane"]

ArrowKind = Literal["data", "message", "collective"]
"""A value that stays on its rank; one that is sent; something that ranks of a group do together."""


@dataclass(frozen=True)
class Box:
    """Operations that are drawn as one.

    Attributes:
        key: names it in arrows.
        lane: the index of the lane that it is in.
        stage: whose operations they are, for the colour; None for what belongs to no stage.
        label: the module.
        detail: a smaller line below.
        tooltip: all that there is to say.
    """

    key: str
    lane: int
    stage: int | None
    label: str
    detail: str
    tooltip: str


@dataclass(frozen=True)
class Arrow:
    """From one box to another; that of a collective has no direction.

    Attributes:
        source, target: keys of boxes.
        kind: what goes there.
        label: how much; empty for what stays on a rank.
        tooltip: all that there is to say.
    """

    source: str
    target: str
    kind: ArrowKind
    label: str = ""
    tooltip: str = ""


@dataclass(frozen=True)
class Lane:
    """A rank.

    Attributes:
        label: ``"rank 0"``.
        detail: its device and place on the mesh.
    """

    label: str
    detail: str


@dataclass(frozen=True)
class Diagram:
    """A drawing without coordinates.

    Attributes:
        title: what is drawn.
        lanes: from left to right.
        boxes: in the order in which they run, lane by lane.
        arrows: between them.
    """

    title: str
    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
