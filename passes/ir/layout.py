"""How a tensor lies over a mesh: for each mesh dimension a placement, in DTensor's words.

    Replicate    every rank has the whole value, computed alike on all; its gradient is whole on every rank, too
    Varying      every rank has the whole value and uses it on a part of the work: its gradient is partial
    Shard        every rank has the part of one axis; its gradient lies the same way
    Partial      every rank has a part of a sum (or of a maximum); the gradient of a sum is replicated

Varying is Replicate on its way into cut compute: the value is the same, the gradient's layout is not. The difference is what makes every
backward communication follow from the forward (as in the types of ``jax.shard_map``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["BATCH", "SPACE", "Layout", "Partial", "Placement", "Replicate", "Shard", "Varying", "shards_of"]

BATCH = "batch"
"""The name of the axis that holds the samples of the inputs."""

SPACE = ("depth", "height", "width")
"""Roles, and names, of the axes of an image or a volume."""


@dataclass(frozen=True)
class Replicate:
    """The whole value, with the whole gradient."""


@dataclass(frozen=True)
class Varying:
    """The whole value, with a part of the gradient."""


@dataclass(frozen=True)
class Shard:
    """A part of one axis.

    Attributes:
        axis: the axis (of ``passes.analysis.axes``).
        dimension: the dimension of the tensor that holds it; an axis may occur in several.
    """

    axis: int
    dimension: int


@dataclass(frozen=True)
class Partial:
    """A part of a reduction over the ranks.

    Attributes:
        operation: what puts the parts together.
    """

    operation: Literal["sum", "max", "min"] = "sum"


Placement: TypeAlias = Replicate | Varying | Shard | Partial
"""How a tensor lies over one mesh dimension."""

Layout: TypeAlias = tuple[Placement, ...]
"""A placement for each dimension of the mesh that cuts axes, outermost first."""


def shards_of(layout: Layout, dimension: int) -> tuple[Shard | None, ...]:
    """Return the placements that shard one dimension of a tensor, and None for the others; an axis may occur in several dimensions."""
    return tuple(place if isinstance(place, Shard) and place.dimension == dimension else None for place in layout)
