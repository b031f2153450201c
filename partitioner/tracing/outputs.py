"""Say what becomes of each result when the batch is cut."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from partitioner.tracing.inputs.flatten import output_names
from passes.analysis.batch_semantics import BatchFlow, combination, follow_batch
from passes.analysis.batch_sizes import Sizes
from passes.analysis.replicable import replicable_nodes
from passes.graph.aliasing import mutated_arguments
from passes.graph.buffer_writes import declared_writes
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import Combine, ModelGraph, Output

__all__ = ["with_outputs"]


def with_outputs(graph: ModelGraph, sizes: Sizes | None) -> ModelGraph:
    """The graph with its outputs described.

    Args:
        sizes: as expressions in the batch; None when they are unknown.
    """
    (leaves,) = graph.graph.output_node().args
    assert isinstance(leaves, tuple | list)
    named = list(zip(output_names(graph.output_tree), leaves, strict=True))
    if sizes is None:
        outputs = tuple(_output(name, leaf, None) for name, leaf in named)
        return dataclasses.replace(graph, outputs=outputs, updates=dict.fromkeys(_written(graph), "mixed"))
    batched = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs if leaf.placeholder is not None and leaf.batch_dim is not None}
    countable = replicable_nodes(graph) | graph.buffers.keys() | graph.constants.keys() | batched.keys()
    flow = follow_batch(graph.graph, sizes, batched, countable)
    outputs = tuple(_output(name, leaf, flow) for name, leaf in named)
    reasons = dict.fromkeys(output.reason for output in outputs if output.reason is not None)
    updates: dict[str, Combine] = {}
    others = _written_besides(graph)
    for name, write in _written(graph).items():
        value = write.args[1]
        assert isinstance(value, fx.Node)
        combine, _, _ = combination(value, flow)
        is_mixed = combine == "concatenate" or name in others  # a buffer has no batch
        updates[name] = "mixed" if is_mixed else combine
    notes = (*graph.notes, *(f"{reason}: its result cannot be put together from microbatches" for reason in reasons))
    return dataclasses.replace(graph, outputs=outputs, notes=notes, mixing=flow.mixing, updates=updates)


def _written(graph: ModelGraph) -> dict[str, fx.Node]:
    """Buffer -> its declared write; running statistics of normalisations are written by these."""
    return declared_writes(graph.graph, graph.buffers)


def _written_besides(graph: ModelGraph) -> frozenset[str]:
    """Buffers that a normalisation writes: with a declared write, too, each microbatch would begin with what the one before left."""
    calls = (node for node in graph.computing_nodes() if node.target is not torch.ops.aten.copy_.default)
    return frozenset(written.name for node in calls if node.op == "call_function" for written in mutated_arguments(node))


def _output(name: str, leaf: object, flow: BatchFlow | None) -> Output:
    """A leaf of the result.

    Args:
        flow: of the batch through the graph; None where that is unknown.
    """
    if not isinstance(leaf, fx.Node):
        return Output(name, None, leaf, "same", None)
    if isinstance(leaf.meta.get("val"), int | torch.SymInt):  # a number that follows from the batch size: no rank computes it
        return Output(name, None, size_of(leaf.meta["val"]), "same", None)
    combine, dimension, reason = ("mixed", None, None) if flow is None else combination(leaf, flow)
    return Output(name, leaf.name, None, combine, dimension, reason)
