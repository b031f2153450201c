"""Facts of a graph for every walk over its layouts, independent of the sharded axes: computed once for all cuts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from passes.analysis.axes import Axes
from passes.analysis.axis_names import head_axes
from passes.analysis.partial_sums import summed_together
from passes.analysis.replicable import replicable_nodes
from passes.graph.aliasing import mutated_arguments
from passes.graph.dependencies import may_require_gradient
from passes.graph.symbolic_sizes import ValueBytes
from passes.ir.graph import ModelGraph


@dataclass(frozen=True, eq=False)
class LayoutFacts:
    """A graph with its axes, and facts about both; each is computed when it is first read.

    Attributes:
        outcomes: layouts of single calls that enumerations have found, by all that they depend on
            (``passes.spmd.propagate.enumerate_layouts``).
    """

    graph: ModelGraph
    axes: Axes
    outcomes: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def bytes(self) -> ValueBytes:
        """The bytes of values."""
        return ValueBytes(self.graph)

    @cached_property
    def parameter_axes(self) -> frozenset[int]:
        """The axes of parameters."""
        tensors = [self.axes.of(name) for name in self.graph.parameters if name in self.axes.tensors]
        return frozenset(axis for tensor in tensors for dimension in tensor for axis in dimension)

    @cached_property
    def heads(self) -> frozenset[int]:
        """The axes of attention heads."""
        return head_axes(self.graph, self.axes)

    @cached_property
    def summed_together(self) -> frozenset[str]:
        """The partial sums that are added before they are reduced."""
        return summed_together(self.graph.graph, self.axes)

    @cached_property
    def replicable(self) -> frozenset[str]:
        """The values that every rank may compute itself."""
        return replicable_nodes(self.graph)

    @cached_property
    def with_gradient(self) -> frozenset[fx.Node]:
        """Values whose gradient may be asked for."""
        return frozenset(may_require_gradient(self.graph.graph, without=[*self.graph.buffers, *self.graph.constants]))

    @cached_property
    def written(self) -> dict[str, frozenset[str]]:
        """Call -> the operands that it writes; absent if there are none."""
        written = {node.name: frozenset(argument.name for argument in mutated_arguments(node)) for node in self.graph.computing_nodes()}
        return {name: arguments for name, arguments in written.items() if arguments}
