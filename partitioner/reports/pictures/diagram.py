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


@dataclass(frozen=True)
class Box:
    """A box: operations of one module.

    Attributes:
        key: identifies the box in arrows.
        lane: index of its lane.
        stage: the stage of the operations, for the colour; None for a box of no stage.
        label: the module.
        detail: a smaller line below the label.
        tooltip: all details.
    """

    key: str
    lane: int
    stage: int | None
    label: str
    detail: str
    tooltip: str


@dataclass(frozen=True)
class Arrow:
    """An arrow from one box to another; that of a collective has no direction.

    Attributes:
        source, target: keys of boxes.
        kind: a value that stays on its rank, a point-to-point message, a collective of a group of ranks.
        label: the bytes; empty for data, which stays on a rank.
        tooltip: all details.
    """

    source: str
    target: str
    kind: Literal["data", "message", "collective"]
    label: str = ""
    tooltip: str = ""


@dataclass(frozen=True)
class Lane:
    """The lane of a rank: the label ``"rank 0"``, and a detail, its device and mesh coordinate."""

    label: str
    detail: str


@dataclass(frozen=True)
class Diagram:
    """A drawing without coordinates: lanes from left to right; boxes in the order in which they run, lane by lane; arrows between them."""

    title: str
    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
