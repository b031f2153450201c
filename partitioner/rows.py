"""Which rows of a batch belong to which rank, where mesh dimensions cut the batch.

mesh {"data": 2, "tensor": 2}, a batch of 8      ranks 0 and 1: rows 0 to 3      ranks 2 and 3: rows 4 to 7
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, Mesh

__all__ = ["RowParts"]


class RowParts:
    """Cuts what comes with a batch into the parts of ranks.

    Args:
        mesh: of all ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._names = tuple(name for name in mesh.names if name in ROWS)
        self.count = math.prod(mesh.length(name) for name in self._names)

    def divides(self, batch: int) -> bool:
        """Whether all ranks can have as many rows."""
        return batch % self.count == 0

    def of_inputs(self, graph: ModelGraph, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """A rank's rows of the inputs; whole what has none."""
        dims = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs}
        return {name: self._part(tensor, dims[name], rank) for name, tensor in tensors.items()}

    def of_results(self, graph: ModelGraph, names: tuple[str, ...], gradients: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
        """A rank's rows of the gradients of results; whole those of results that have none."""
        dims = {output.node: output.batch_dim if output.combine == "concatenate" else None for output in graph.outputs}
        return tuple(self._part(gradient, dims[name], rank) for name, gradient in zip(names, gradients, strict=True))

    def of_target(self, target: Any, batch: int, rank: int) -> Any:
        """A rank's rows of every tensor in the target whose first dimension is the batch."""
        return pytree.tree_map_only(
            Tensor, lambda leaf: self._part(leaf, 0, rank) if leaf.dim() > 0 and leaf.shape[0] == batch else leaf, target
        )

    def _part(self, value: Tensor, dim: int | None, rank: int) -> Tensor:
        if dim is None or self.count == 1:
            return value
        place, coordinate = 0, self._mesh.coordinate(rank)
        for name in self._names:
            place = place * self._mesh.length(name) + coordinate[name]
        size = value.shape[dim] // self.count
        return value.narrow(dim, place * size, size)
