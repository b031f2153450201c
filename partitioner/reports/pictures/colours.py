"""The colours of stages and of the communication between them: a light one and a dark one each, distinct for colour-blind readers.

The hues of stages are those of Okabe and Ito (2008), softened to carry text.
"""

from __future__ import annotations

from cost_models.svg import Colour

STAGES: tuple[Colour, ...] = (
    ("#cfe3f7", "#1f4468"),
    ("#fbe0b8", "#6a4a12"),
    ("#cdeadd", "#1d5140"),
    ("#f7d3de", "#6b2b43"),
    ("#e0d6f2", "#43346b"),
    ("#f4efb5", "#57521a"),
    ("#d3eef6", "#1c5263"),
    ("#f3d2c1", "#6b361d"),
)
"""The fill of a stage's boxes, light and dark."""

PLAIN: Colour = ("#eef0f3", "#2a2f36")
"""Of boxes of no stage."""

LINKS: dict[str, Colour] = {
    "data": ("#9aa3ae", "#7d8794"),
    "message": ("#cf5c3b", "#f08a68"),
    "collective": ("#7a5ea8", "#b49bdf"),
}
"""Colours of local values, messages and collectives."""


def stage_colour(stage: int | None) -> Colour:
    """Return the fill of a stage's boxes, light and dark; colours repeat if there are more stages."""
    return PLAIN if stage is None else STAGES[stage % len(STAGES)]
