"""Describe how each result, and each write of a buffer, is put together from microbatches."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from passes.analysis.batch_semantics import BatchFlow, combination, follow_batch
from passes.analysis.batch_sizes import Sizes
from passes.analysis.replicable import replicable_nodes
from passes.graph.aliasing import mutated_arguments
from passes.graph.buffer_writes import declared_writes
from passes.graph.provenance import checkpoint_of
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import WEIGHTED, Combine, ModelGraph, Output

REPEATED_WRITES = (
    "is written under torch.utils.checkpoint: PyTorch may write it twice in a training step, forward and when it computes the region "
    "again; the programs write it once. To have the model do so, leave the checkpoint out and pass recompute="
)
"""How a note ends that names the first such buffer."""


def add_outputs(graph: ModelGraph, sizes: Sizes | None) -> ModelGraph:
    """Return the graph with its outputs, and the updates of its buffers, described.

    Args:
        graph: its outputs have names and destinations.
        sizes: sizes of values as expressions in the batch; None when unknown: then all outputs and updates are "mixed".
    """
    (results,) = graph.graph.output_node().args
    assert isinstance(results, tuple | list)
    described = list(zip(graph.outputs, results, strict=True))
    writes = declared_writes(graph.graph, graph.buffers)  # buffer -> its write; running statistics of normalizations have one
    graph = dataclasses.replace(graph, notes=(*graph.notes, *_repeated_writes(graph)))
    if sizes is None:
        outputs = tuple(_output(output, result, None) for output, result in described)
        return dataclasses.replace(graph, outputs=outputs, updates=dict.fromkeys(writes, "mixed"))
    batch_dims = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs if leaf.placeholder is not None and leaf.batch_dim is not None}
    countable = replicable_nodes(graph) | graph.buffers.keys() | graph.constants.keys() | batch_dims.keys()
    flow = follow_batch(graph.graph, sizes, batch_dims, countable)
    for node, calls in flow.weighted.items():
        node.meta[WEIGHTED] = calls
    outputs = tuple(_output(output, result, flow) for output, result in described)
    reasons = dict.fromkeys(output.reason for output in outputs if output.reason is not None)
    updates: dict[str, Combine] = {}
    written_by_ops = _buffers_written_by_ops(graph)
    for name, write in writes.items():
        value = write.args[1]
        assert isinstance(value, fx.Node)
        combine, _, _ = combination(value, flow)
        is_mixed = combine == "concatenate" or name in written_by_ops  # a buffer has no batch
        updates[name] = "mixed" if is_mixed else combine
    notes = (*graph.notes, *(f"{reason}: its result cannot be put together from microbatches" for reason in reasons))
    return dataclasses.replace(graph, outputs=outputs, notes=notes, mixing=flow.mixing, updates=updates)


def _repeated_writes(graph: ModelGraph) -> tuple[str, ...]:
    """Return a note if buffers are written in regions that PyTorch would compute again."""
    found = dict[str, None]()
    for node in graph.computing_nodes():
        written = mutated_arguments(node) if node.op == "call_function" else ()
        value = node.args[1] if node.target is torch.ops.aten.copy_.default else node
        if written and isinstance(value, fx.Node) and checkpoint_of(value) is not None:
            found.update((graph.buffers[each.name], None) for each in written if each.name in graph.buffers)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (f"buffer {next(iter(found))}{more} {REPEATED_WRITES}",) if found else ()


def _buffers_written_by_ops(graph: ModelGraph) -> frozenset[str]:
    """Return the buffers that an op other than ``copy_`` writes: each microbatch would start from the value of the one before."""
    calls = (node for node in graph.computing_nodes() if node.target is not torch.ops.aten.copy_.default)
    return frozenset(written.name for node in calls if node.op == "call_function" for written in mutated_arguments(node))


def _output(output: Output, result: object, flow: BatchFlow | None) -> Output:
    """Return the description of one result; None for ``flow`` makes it "mixed"."""
    if not isinstance(result, fx.Node):
        return dataclasses.replace(output, constant=result)
    if isinstance(result.meta.get("val"), int | torch.SymInt):  # a number that follows from the batch size: no rank computes it
        return dataclasses.replace(output, constant=size_of(result.meta["val"]))
    combine, dimension, reason = ("mixed", None, None) if flow is None else combination(result, flow)
    return dataclasses.replace(output, node=result.name, combine=combine, batch_dim=dimension, reason=reason)
