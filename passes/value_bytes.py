"""How large the values of a graph are."""

from __future__ import annotations

from torch import Tensor, fx

from passes.ir.graph import ModelGraph
from passes.size_expression import bytes_of

__all__ = ["ValueBytes"]


class ValueBytes:
    """Bytes of the values of a graph, each counted once for all walks."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._counted: dict[fx.Node, int] = {}

    def of(self, node: fx.Node) -> int:
        """At the batch size that the graph was traced with; of a call that gives several values, all together."""
        if node not in self._counted:
            value = node.meta["val"]
            tensors = [value] if isinstance(value, Tensor) else [part for part in value if isinstance(part, Tensor)]
            self._counted[node] = sum(bytes_of(tensor, self._graph.batch, self._graph.batch_size) for tensor in tensors)
        return self._counted[node]
