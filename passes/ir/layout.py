"""The layout of a tensor over a mesh: a placement for each mesh dimension, named as in DTensor.

    Replicate    every rank has the whole value; its gradient is whole on every rank, too
    Varying      every rank has the whole value and uses it for a part of the work: its gradient is partial
    Shard        every rank has a part of one axis; its gradient has the same placement
    Partial      every rank has a part of a sum (or of a maximum); the gradient of a sum is replicated

Varying is a replicated operand of sharded compute: the value is that of Replicate, the gradient's layout is not. The difference determines
the communication of the backward from the forward (as in the types of ``jax.shard_map``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

BATCH = "batch"
"""The name of the axis that holds the samples of the inputs."""

SPACE = ("depth", "height", "width")
"""Roles, and names, of the axes of an image or a volume."""


@dataclass(frozen=True)
class Replicate:
    """The whole value, with the whole gradient."""


@dataclass(frozen=True)
class Varying:
    """The whole value on every rank, each with a partial gradient; the gradients are summed over the ranks."""


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
        operation: the reduction that combines the parts.
    """

    operation: Literal["sum", "max", "min"] = "sum"


Placement: TypeAlias = Replicate | Varying | Shard | Partial
"""The distribution of a tensor over one mesh dimension."""

Layout: TypeAlias = tuple[Placement, ...]
"""A placement for each mesh dimension that shards axes, outermost first."""


def shards_of(layout: Layout, dimension: int) -> tuple[Shard | None, ...]:
    """Return for each mesh dimension its placement if that shards a dimension of the tensor, else None."""
    return tuple(placement if isinstance(placement, Shard) and placement.dimension == dimension else None for placement in layout)
