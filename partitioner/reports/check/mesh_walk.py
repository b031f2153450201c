"""Compare the values of all nodes of a cut model: the whole graph beside what the ranks' parts make together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from partitioner.options.batch_rows import RowParts
from partitioner.reports.check.compare import Comparison, compare, largest_magnitude
from partitioner.reports.check.lockstep import run_in_lockstep
from partitioner.reports.check.node_walk import NodeWalk, values_of
from partitioner.reports.check.report import Difference
from passes.analysis.axes import TensorAxes
from passes.autograd.staged_model import LoweredStages
from passes.graph.provenance import place_of
from passes.ir.layout import Layout, Partial, Shard
from passes.ir.program import at_batch
from passes.spmd.local_shapes import Extents
from passes.spmd.shard_graph import CutModel
from passes.spmd.shard_stages import StagedCut
from passes.spmd.shards import block_of

__all__ = ["walk_mesh"]


def walk_mesh(
    staged: StagedCut, lowered: LoweredStages, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], batch: int, seed: int
) -> NodeWalk:
    """Run both and compare node by node.

    Args:
        staged: the model and its parts.
        lowered: the stages of the first pipeline.
        tensors: parameters, buffers and constants, whole, by placeholder; they stay as they are.
        inputs: the model's inputs by placeholder, whole batch.
        batch: its rows.
        seed: of the random numbers that both draw.
    """
    cuts = [cut for cut in {id(cut): cut for cut in staged.of_places}.values() if cut.cut.mesh.size > 1]
    walks = [_walk(cut, _of_cut(staged, cut, lowered), tensors, inputs, batch, seed) for cut in cuts]
    found = [walk.first for walk in walks if walk.first is not None]
    first = min(found, key=lambda each: each.stage, default=None)
    return NodeWalk(tuple(each for walk in walks for each in walk.comparisons), first)


def _of_cut(staged: StagedCut, cut: CutModel, lowered: LoweredStages) -> LoweredStages:
    """The stages that are taken from one of the cuts."""
    ranks = lowered.stage_ranks
    return replace(lowered, stages=tuple(stage for stage in lowered.stages if staged.of_places[ranks[stage.index][0]] is cut))


def _walk(
    cut: CutModel, lowered: LoweredStages, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], batch: int, seed: int
) -> NodeWalk:
    """What the given stages compute, beside the whole graph."""
    graph, mesh = cut.graph, cut.cut.mesh
    extents = _extents(cut, batch)
    rows = RowParts(mesh) if cut.parts[0].part.n_row_parts > 1 else None  # where every rank has rows of its own
    with torch.no_grad():
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        values = values_of(graph, {**own, **inputs, "batch": batch}, seed)
        torch.manual_seed(seed)
        parts = run_in_lockstep(
            [part.graph for part in cut.parts],
            mesh,
            [
                {
                    **{name: cut.blocks[rank][name].take(tensor).clone() for name, tensor in tensors.items()},
                    **(inputs if rows is None else rows.inputs_of_rank(graph, inputs, rank)),
                    "batch": batch if rows is None else batch // rows.count,
                }
                for rank in range(mesh.size)
            ],
        )
    stages = _stages_of_parts(lowered)
    comparisons: list[Comparison] = []
    first: Difference | None = None
    scales: dict[str, float] = {}
    for node in graph.computing_nodes():
        stage = stages.get(node.name)
        if node.name not in values or node.name not in parts or stage is None:
            continue
        reference = values[node.name]
        found = _together(parts[node.name], cut.axes.of(node.name), cut.layouts.results[node.name][0], extents)
        scales[node.name] = largest_magnitude(reference)
        scale = max((scales.get(source.name, 0.0) for source in node.all_input_nodes), default=0.0)
        comparisons.append(compare(node.name, reference, found, scale=scale))
        if first is None and not comparisons[-1].equal:
            first = Difference(node.name, place_of(node), stage, lowered.stage_ranks[stage][0], comparisons[-1], "")
    return NodeWalk(tuple(comparisons), first)


def _stages_of_parts(lowered: LoweredStages) -> Mapping[str, int]:
    """For each call the first stage that computes a part of it."""
    found: dict[str, int] = {}
    for stage in lowered.stages:
        for node in stage.module.graph.nodes:
            found.setdefault(node.meta.get("part_of"), stage.index)
    return found


def _extents(cut: CutModel, batch: int) -> list[Extents]:
    """For each rank, its sizes at a batch size."""
    sizes = tuple(at_batch(size, batch) for size in cut.axes.sizes)
    dimensions = cut.cut.mesh.dimensions
    return [Extents(sizes, dimensions, place, None, 1) for place in itertools.product(*(range(size) for _, size in dimensions))]


def _together(parts: Sequence[Tensor], axes: TensorAxes, layout: Layout, extents: Sequence[Extents]) -> Tensor:
    """The whole value: blocks put side by side, parts of sums added, of copies the first."""
    first = block_of(axes, layout, extents[0])
    whole = torch.zeros(first.shape, dtype=parts[0].dtype, device=parts[0].device)
    for part, each in zip(parts, extents, strict=True):
        copies = [index for index, place in enumerate(layout) if not isinstance(place, Shard | Partial)]
        if any(each.coordinate[index] != 0 for index in copies):
            continue
        block = block_of(axes, layout, each)
        block.put(whole, block.take(whole) + part if part.dtype is not torch.bool else block.take(whole) | part)
    return whole
