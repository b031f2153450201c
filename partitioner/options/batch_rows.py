"""Cut a batch into the rows of each rank, where mesh dimensions shard the batch.

mesh {"data": 2, "tensor": 2}, a batch of 8      ranks 0 and 1: rows 0 to 3      ranks 2 and 3: rows 4 to 7

inputs="global"      every process passes all 8 rows, and gets the results of all
inputs="local"       every process passes its own 4 rows, and gets the results of these
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, Mesh
from passes.ir.torch_private import pytree

Inputs = Literal["global", "local"]
"""Whether each process passes the whole batch under torchrun, or its own rows."""


class RowParts:
    """Cuts inputs, targets and gradients of a batch into the rows of each rank.

    Args:
        mesh: of all ranks; it cuts the batch into ``count`` parts.
        inputs: whether processes pass the whole batch, or their own rows.
    """

    def __init__(self, mesh: Mesh, inputs: Inputs = "global") -> None:
        self._mesh = mesh
        self._names = tuple(name for name in mesh.names if name in ROWS)
        self.count = math.prod(mesh.length(name) for name in self._names)
        self.inputs = inputs

    def part_index(self, rank: int) -> int:
        """Return which part of the batch a rank computes, from 0."""
        index, coordinate = 0, self._mesh.coordinate(rank)
        for name in self._names:
            index = index * self._mesh.length(name) + coordinate[name]
        return index

    def batch_size(self, passed: int) -> int:
        """Return the rows of the batch, from the rows that each process passes."""
        return passed * self.count if self.inputs == "local" else passed

    def rows_passed(self, batch: int) -> int:
        """Return the rows that each process passes and gets back, from the rows of the batch."""
        return batch // self.count if self.inputs == "local" else batch

    def divides(self, batch: int) -> bool:
        """Return whether the batch has equally many rows for each part."""
        return batch % self.count == 0

    def inputs_of_rank(self, graph: ModelGraph, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return a rank's rows of the inputs; an input without rows is returned whole."""
        dims = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs}
        return {name: self.part(tensor, dims[name], rank) for name, tensor in tensors.items()}

    def output_gradients(self, graph: ModelGraph, names: tuple[str, ...], gradients: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
        """Return a rank's rows of the gradients of outputs; whole those of outputs without rows.

        With local inputs every rank has a loss of its own rows, and the backward is that of the mean over ranks: divide by their number.
        """
        dims = {output.node: output.batch_dim if output.combine == "concatenate" else None for output in graph.outputs}
        if self.inputs == "local":
            return tuple(gradient if dims[name] is None else gradient / self.count for name, gradient in zip(names, gradients, strict=True))
        return tuple(self.part(gradient, dims[name], rank) for name, gradient in zip(names, gradients, strict=True))

    def input_gradients(self, graph: ModelGraph, names: Sequence[str], gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Undo the division of ``output_gradients`` for inputs with rows: their gradients are those of the rank's own loss."""
        if self.inputs != "local":
            return tuple(gradients)
        dims = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs}
        return tuple(
            gradient if gradient is None or dims[name] is None else gradient * self.count
            for name, gradient in zip(names, gradients, strict=True)
        )

    def target_of_rank(self, target: Any, batch: int, rank: int) -> Any:
        """Return a rank's rows of every tensor in the target whose first dimension is the batch."""

        def part(leaf: Tensor) -> Tensor:
            return self.part(leaf, 0, rank) if leaf.dim() > 0 and leaf.shape[0] == batch else leaf

        return part(target) if isinstance(target, Tensor) else pytree.tree_map_only(Tensor, part, target)

    def part(self, value: Tensor, dim: int | None, rank: int) -> Tensor:
        """Return a rank's rows of a value of the whole batch; ``dim``: its batch dimension, None if it has none."""
        if dim is None or self.count == 1 or self.inputs == "local":
            return value
        size = value.shape[dim] // self.count
        return value.narrow(dim, self.part_index(rank) * size, size)
