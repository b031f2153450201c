"""Compare the values of all nodes of a sharded model: the whole graph beside the full tensors that the ranks' shards make up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partitioner.options.batch_rows import RowParts
from partitioner.reports.check.compare import Comparison, compare, largest_magnitude
from partitioner.reports.check.lockstep import run_in_lockstep
from partitioner.reports.check.node_walk import NodeWalk, values_of
from partitioner.reports.check.original import SEED
from partitioner.reports.check.report import Difference
from passes.analysis.axes import TensorAxes
from passes.autograd.staged_model import SplitModel
from passes.graph.provenance import place_of
from passes.ir.layout import Layout, Partial, Shard
from passes.ir.program import at_batch
from passes.spmd.local_shapes import Extents
from passes.spmd.shard_graph import CutModel
from passes.spmd.shard_stages import StagedCut
from passes.spmd.shards import block_of


def walk_mesh(staged: StagedCut, lowered: SplitModel, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], batch: int) -> NodeWalk:
    """Run the whole graph and the ranks' graphs, and compare node by node.

    Args:
        staged: the sharded model; stages with their own tensor-parallel degree have a ``CutModel`` of their own.
        lowered: the stages of the first pipeline.
        tensors: full parameters, buffers and constants by placeholder; they are not written.
        inputs: the model's inputs by placeholder, whole batch.
        batch: rows of the batch.
    """
    distinct = {id(cut): cut for cut in staged.of_places}.values()
    cuts = [cut for cut in distinct if cut.cut.mesh.size > 1]
    walks = [_walk_cut(cut, _stages_of_cut(staged, cut, lowered), tensors, inputs, batch) for cut in cuts]
    differences = [walk.first for walk in walks if walk.first is not None]
    first = min(differences, key=lambda difference: difference.stage, default=None)
    return NodeWalk(tuple(comparison for walk in walks for comparison in walk.comparisons), first)


def _stages_of_cut(staged: StagedCut, cut: CutModel, lowered: SplitModel) -> SplitModel:
    """Keep only the stages whose ranks run graphs of this cut."""
    ranks = lowered.stage_ranks
    return replace(lowered, stages=tuple(stage for stage in lowered.stages if staged.of_places[ranks[stage.index][0]] is cut))


def _walk_cut(cut: CutModel, lowered: SplitModel, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], batch: int) -> NodeWalk:
    """Compare the nodes of these stages with the whole graph; arguments as for ``walk_mesh``."""
    graph = cut.graph
    extents = _extents_of_ranks(cut, batch)
    with torch.no_grad():
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        values = values_of(graph, {**own, **inputs, "batch": batch})
        torch.manual_seed(SEED)
        shards = run_in_lockstep([part.graph for part in cut.parts], cut.cut.mesh, _inputs_of_ranks(cut, tensors, inputs, batch))
    stages = _stages_by_node(lowered)
    comparisons: list[Comparison] = []
    first: Difference | None = None
    magnitudes: dict[str, float] = {}
    for node in graph.computing_nodes():
        stage = stages.get(node.name)
        if node.name not in values or node.name not in shards or stage is None:
            continue
        reference = values[node.name]
        actual = _full_tensor(shards[node.name], cut.axes.of(node.name), cut.layouts.results[node.name][0], extents)
        magnitudes[node.name] = largest_magnitude(reference)
        scale = max((magnitudes.get(source.name, 0.0) for source in node.all_input_nodes), default=0.0)
        comparisons.append(compare(node.name, reference, actual, scale=scale))
        if first is None and not comparisons[-1].equal:
            first = Difference(node.name, place_of(node), stage, lowered.stage_ranks[stage][0], comparisons[-1], "")
    return NodeWalk(tuple(comparisons), first)


def _inputs_of_ranks(cut: CutModel, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], batch: int) -> list[Mapping[str, Any]]:
    """Return for each rank its shards of parameters, its rows of the inputs and its batch size, by placeholder."""
    mesh = cut.cut.mesh
    rows = RowParts(mesh) if cut.parts[0].part.n_row_parts > 1 else None  # None: every rank gets all rows
    return [
        {
            **{name: cut.blocks[rank][name].take(tensor).clone() for name, tensor in tensors.items()},
            **(inputs if rows is None else rows.inputs_of_rank(cut.graph, inputs, rank)),
            "batch": batch if rows is None else batch // rows.count,
        }
        for rank in range(mesh.size)
    ]


def _stages_by_node(lowered: SplitModel) -> Mapping[str, int]:
    """Map each node of the whole model to the first stage that computes a shard of it."""
    stages: dict[str, int] = {}
    for stage in lowered.stages:
        for node in stage.module.graph.nodes:
            stages.setdefault(node.meta.get("part_of"), stage.index)
    return stages


def _extents_of_ranks(cut: CutModel, batch: int) -> list[Extents]:
    """Return the sizes of each rank's shards at a batch size, in rank order."""
    sizes = tuple(at_batch(size, batch) for size in cut.axes.sizes)
    dimensions = cut.cut.mesh.dimensions
    places = itertools.product(*(range(size) for _, size in dimensions))
    return [Extents(sizes, dimensions, place, None, 1, cut.axes.segments) for place in places]


def _full_tensor(shards: Sequence[Tensor], axes: TensorAxes, layout: Layout, extents: Sequence[Extents]) -> Tensor:
    """Assemble a tensor from the shards of all ranks: place sharded blocks, add partial sums, take the first of replicas."""
    whole = torch.zeros(block_of(axes, layout, extents[0]).shape, dtype=shards[0].dtype, device=shards[0].device)
    replicated = [dimension for dimension, placement in enumerate(layout) if not isinstance(placement, Shard | Partial)]
    for shard, extent in zip(shards, extents, strict=True):
        if any(extent.coordinate[dimension] != 0 for dimension in replicated):
            continue
        block = block_of(axes, layout, extent)
        block.put(whole, block.take(whole) + shard if shard.dtype is not torch.bool else block.take(whole) | shard)
    return whole
