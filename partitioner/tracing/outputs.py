"""Say what becomes of each result when the batch is cut."""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

import torch
from torch import fx

from partitioner.tracing.inputs.flatten import output_names
from passes.analysis.batch_semantics import combination, follow_batch
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
    names = output_names(graph.output_tree)
    (leaves,) = graph.graph.output_node().args
    assert isinstance(leaves, tuple | list)
    if sizes is None:
        outputs = tuple(_uncut(name, leaf) for name, leaf in zip(names, leaves, strict=True))
        return dataclasses.replace(graph, outputs=outputs, updates=dict.fromkeys(_written(graph), "mixed"))
    batched = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs if leaf.placeholder is not None and leaf.batch_dim is not None}
    countable = replicable_nodes(graph) | graph.buffers.keys() | graph.constants.keys() | batched.keys()
    flow = follow_batch(graph.graph, sizes, batched, countable)
    described = []
    reasons: dict[str, None] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if _is_size(leaf):
            described.append(_size(name, leaf))
        elif isinstance(leaf, fx.Node):
            combine, dimension, reason = combination(leaf, flow)
            described.append(Output(name, leaf.name, None, combine, dimension, reason))
            if reason is not None:
                reasons[f"{reason}: its result cannot be put together from microbatches"] = None
        else:
            described.append(Output(name, None, leaf, "same", None))
    updates: dict[str, Combine] = {}
    others = _written_besides(graph)
    for name, write in _written(graph).items():
        value = write.args[1]
        assert isinstance(value, fx.Node)
        combine, _, _ = combination(value, flow)
        is_mixed = combine == "concatenate" or name in others  # a buffer has no batch
        updates[name] = "mixed" if is_mixed else combine
    notes = (*graph.notes, *reasons)
    return dataclasses.replace(graph, outputs=tuple(described), notes=notes, mixing=flow.mixing, updates=updates)


def _written(graph: ModelGraph) -> dict[str, fx.Node]:
    """Buffer -> its declared write; running statistics of normalisations are written by these."""
    return declared_writes(graph.graph, graph.buffers)


def _written_besides(graph: ModelGraph) -> frozenset[str]:
    """Buffers that a normalisation writes: with a declared write, too, each microbatch would begin with what the one before left."""
    calls = (node for node in graph.computing_nodes() if node.target is not torch.ops.aten.copy_.default)
    return frozenset(written.name for node in calls if node.op == "call_function" for written in mutated_arguments(node))


def _is_size(leaf: object) -> TypeGuard[fx.Node]:
    """Whether a result is a number that follows from the batch size: no rank computes it."""
    return isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), int | torch.SymInt)


def _size(name: str, leaf: fx.Node) -> Output:
    return Output(name, None, size_of(leaf.meta["val"]), "same", None)


def _uncut(name: str, leaf: object) -> Output:
    if _is_size(leaf):
        return _size(name, leaf)
    if isinstance(leaf, fx.Node):
        return Output(name, leaf.name, None, "mixed", None)
    return Output(name, None, leaf, "same", None)
