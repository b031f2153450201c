"""Find uses of tables that depend on sizes: slices, and lookups of rows that a table does not have.

    positions = arange(129)                  length 129
    embedding(table, positions)              a table of 64 rows: row 128 does not exist
    table[:, :height, :width]                traced for images of 8 x 8: aten.slice(aten.slice(table, 1, 0, 8), 2, 0, 8)

A trace does not see a missing row: it computes no values. Positions are computed here, from sizes and buffers alone; indices that depend
on the inputs are found when a program runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from passes.graph.provenance import place_of
from passes.graph.schemas import bound_arguments, draws, packet
from passes.ir.errors import Place
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import OpOverload
from passes.normalize.symbolic_batch import TAKING

aten = torch.ops.aten

_LARGEST = 2**22
"""Indices of more elements are not computed."""


@dataclass(frozen=True)
class Lookup:
    """A lookup of a row that does not exist.

    Attributes:
        place: of the lookup.
        row: the row.
        rows: of the table.
    """

    place: Place
    row: int
    rows: int


def lookup_beyond_table(graph: ModelGraph, model: nn.Module) -> Lookup | None:
    """Return the first lookup that reads beyond the end of a table for all values of the inputs."""
    known = _ComputedValues(graph, model)
    for node in graph.graph.nodes:
        if node.target is not aten.embedding.default:
            continue
        table, indices = node.args[:2]
        value = known.of(indices)
        rows = int(table.meta["val"].shape[0])
        if isinstance(value, Tensor) and value.numel() and (row := int(value.max())) >= rows:
            return Lookup(place_of(node), row, rows)
    return None


class _ComputedValues:
    """Values of nodes that depend on sizes, buffers and constants alone, for a batch of one row."""

    def __init__(self, graph: ModelGraph, model: nn.Module) -> None:
        self._graph, self._model = graph, model
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node; None if it depends on anything else, or is large."""
        if node not in self._known:
            self._known[node] = self._computed(node)
        return self._known[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._given(node.name)
        value = node.meta.get("val")
        if node.op != "call_function" or draws(node) or (isinstance(value, Tensor) and value.is_floating_point()):
            return None
        if any(self.of(source) is None for source in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
        assert callable(node.target)
        result = node.target(*args, **kwargs)
        return None if isinstance(result, Tensor) and result.numel() > _LARGEST else result

    def _given(self, name: str) -> Any:
        """Return the value of a placeholder that is the batch, a buffer or a constant of integers with values."""
        if name == "batch":
            return 1
        tensor = self._graph.constants.get(name)
        if tensor is None and name in self._graph.buffers:
            tensor = self._model.get_buffer(self._graph.buffers[name])
        has_values = tensor is not None and not tensor.is_meta and not tensor.is_floating_point()
        return tensor.cpu() if tensor is not None and has_values else None


def takes_of_weights(program: ExportedProgram) -> bool:
    """Return whether a program slices a table that it computes from weights alone: several elements of a dimension, from the start."""
    inputs = set(program.graph_signature.user_inputs)
    of_weights: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in inputs:
            of_weights.add(node)
        elif node.op == "call_function" and node.all_input_nodes and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
            if isinstance(node.target, OpOverload) and packet(node.target) in TAKING and _takes_some(node):
                return True
    return False


def _takes_some(node: fx.Node) -> bool:
    """Return whether a call may take a number of elements from the start."""
    bound = bound_arguments(node)
    if "end" not in bound:
        return "tensors" not in bound  # what is joined of weights alone is the same for every size
    return bound["start"] in (None, 0) and isinstance(bound["end"], int) and 1 < bound["end"] < sys.maxsize
