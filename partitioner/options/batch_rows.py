"""Which rows of a batch belong to which rank, where mesh dimensions cut the batch.

mesh {"data": 2, "tensor": 2}, a batch of 8      ranks 0 and 1: rows 0 to 3      ranks 2 and 3: rows 4 to 7

inputs="global"      every process passes all 8 rows, and gets the results of all
inputs="local"       every process passes its own 4, and gets theirs
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, Mesh
from passes.ir.torch_private import pytree

__all__ = ["Inputs", "RowParts"]

Inputs = Literal["global", "local"]
"""What each process passes under torchrun: the whole batch, or its own rows."""


class RowParts:
    """Cuts what comes with a batch into the parts of ranks.

    Args:
        mesh: of all ranks.
        inputs: whether processes pass the whole batch, or are local to their rows.
    """

    def __init__(self, mesh: Mesh, inputs: Inputs = "global") -> None:
        self._mesh = mesh
        self._names = tuple(name for name in mesh.names if name in ROWS)
        self.count = math.prod(mesh.length(name) for name in self._names)
        self.inputs = inputs

    def place(self, rank: int) -> int:
        """Which part of the rows is a rank's."""
        place, coordinate = 0, self._mesh.coordinate(rank)
        for name in self._names:
            place = place * self._mesh.length(name) + coordinate[name]
        return place

    def whole(self, passed: int) -> int:
        """Rows of the batch, from those that each process passes."""
        return passed * self.count if self.inputs == "local" else passed

    def passed(self, batch: int) -> int:
        """Rows that each process passes, and gets back."""
        return batch // self.count if self.inputs == "local" else batch

    def divides(self, batch: int) -> bool:
        """Whether all ranks can have as many rows."""
        return batch % self.count == 0

    def of_inputs(self, graph: ModelGraph, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """A rank's rows of the inputs; whole what has none."""
        dims = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs}
        return {name: self._part(tensor, dims[name], rank) for name, tensor in tensors.items()}

    def of_results(self, graph: ModelGraph, names: tuple[str, ...], gradients: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
        """A rank's rows of the gradients of results; whole those of results that have none.

        Where inputs are local, every rank has a loss of its own rows: the gradients are those of the mean over ranks.
        """
        dims = {output.node: output.batch_dim if output.combine == "concatenate" else None for output in graph.outputs}
        if self.inputs == "local":
            return tuple(gradient if dims[name] is None else gradient / self.count for name, gradient in zip(names, gradients, strict=True))
        return tuple(self._part(gradient, dims[name], rank) for name, gradient in zip(names, gradients, strict=True))

    def of_input_gradients(self, graph: ModelGraph, names: Sequence[str], gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of inputs from those of ``of_results``: where inputs are local, of a rank's own loss with respect to its rows."""
        dims = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs}
        own = self.inputs == "local"
        return tuple(
            gradient * self.count if own and gradient is not None and dims[name] is not None else gradient
            for name, gradient in zip(names, gradients, strict=True)
        )

    def of_target(self, target: Any, batch: int, rank: int) -> Any:
        """A rank's rows of every tensor in the target whose first dimension is the batch."""
        return pytree.tree_map_only(
            Tensor, lambda leaf: self._part(leaf, 0, rank) if leaf.dim() > 0 and leaf.shape[0] == batch else leaf, target
        )

    def _part(self, value: Tensor, dim: int | None, rank: int) -> Tensor:
        if dim is None or self.count == 1 or self.inputs == "local":
            return value
        size = value.shape[dim] // self.count
        return value.narrow(dim, self.place(rank) * size, size)
