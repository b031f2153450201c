"""Simulate the step of a plan before there is a runtime: its programs are lowered for one rank of each kind.

    plan ─> graph for the microbatch's size ─> cut ─> stages ─> programs

                 tensor 0   tensor 1
    data 0       rank 0     rank 1          four ranks of one kind: rank 3 is lowered, and counts four times
    data 1       rank 2     rank 3

Pipelines are of one kind if their shards have the same sizes, their devices are equal, and their links are equally fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster, Level, Link
from cost_models.simulator.result import Simulation
from cost_models.simulator.simulate import Representatives, simulate_programs
from partitioner.options.batch_rows import RowParts
from partitioner.schedules.catalog import schedule_of
from partitioner.specialize.programs import results_in_training
from partitioner.specialize.sharded_model import representatives_of
from partitioner.tracing.inputs.batch_dims import BatchDims
from partitioner.tracing.trace import trace
from passes.autograd.staged_model import Differentiation, SplitModel
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.normalize.loss_alone import results_of_step
from passes.normalize.specialize_batch import fix_batch
from passes.pipeline import Lowered, Lowerer, Target, values_requiring_gradient

_MOST_NODES = 100_000
"""Programs with more nodes are simulated by representatives, whose stages stay calls."""


@dataclass(frozen=True)
class Traced:
    """A model with its graph.

    Attributes:
        model: whose parameters say what trains.
        graph: its trace.
        args, kwargs: the example of a call; ``args`` is None if they are inferred.
        batch_dims: the batch dimension of inputs by name, as ``partition`` takes them.
    """

    model: nn.Module
    graph: ModelGraph
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any] | None
    batch_dims: BatchDims | None = None


@dataclass(frozen=True)
class Timed:
    """Programs whose time is to be simulated.

    Attributes:
        programs: the programs of one rank of each kind, or of all ranks.
        representatives: the ranks that each program stands for.
        n_row_parts: the number of parts into which ranks split the batch.
    """

    programs: tuple[Program, ...]
    representatives: Representatives
    n_row_parts: int


def simulate_plan(traced: Traced, plan: Plan, cluster: Cluster, cost_model: CostModel, optimizer: str) -> Simulation:
    """Return the simulated step of a plan.

    Args:
        cluster: the machine that the plan was made for.
        cost_model: prices kernels and messages.
        optimizer: its state counts as memory.

    Raises:
        PartitionError: the plan cannot be lowered.
    """
    each_rank, fused_attention = not is_uniform(plan.grid, cluster), cluster.has_accelerators
    timed = timed_programs(traced, plan, each_rank=each_rank, fused_attention=fused_attention)
    return simulate_timed(timed, plan, cluster, cost_model, optimizer)


def simulate_timed(timed: Timed, plan: Plan, cluster: Cluster, cost_model: CostModel, optimizer: str) -> Simulation:
    """Return the simulated step of the programs of a plan."""
    return simulate_programs(
        timed.programs,
        cluster,
        cost_model,
        plan.batch_size,
        optimizer=optimizer,
        n_row_parts=timed.n_row_parts,
        representatives=timed.representatives,
    )


@gc_paused()
def timed_programs(traced: Traced, plan: Plan, *, each_rank: bool = False, fused_attention: bool = False) -> Timed:
    """Return the programs of a training step, or of a forward in evaluation, without a runtime; they equal ``pm.graphs``.

    Args:
        each_rank: lower the programs of all ranks, also if some are of one kind.
        fused_attention: lower attention with dropout as on accelerators (``Target.fused_attention``).

    Raises:
        PartitionError: the plan cannot be lowered.
    """
    has_means = any(output.combine == "mean" for output in traced.graph.outputs)
    rows, count = RowParts(plan.grid), plan.n_microbatches
    model = traced.model
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device.type == "meta":  # as in ``partition``: not every operator can be differentiated on the meta device
        device = torch.device("cpu")
    lowerer = Lowerer(Lowered(plan, _graph_for_microbatch(traced, plan)))
    target = Target(
        kept=results_of_step(traced.graph) if traced.graph.training else None,
        in_parts=has_means and (count > 1 or plan.grid.cutting.size > 1),
        results=results_in_training(traced.graph) if traced.graph.training else "rows",
        rows=rows.divides(plan.batch_size),
        devices=(device,) * plan.n_ranks,
        pipelines="all" if each_rank else "kinds",
        n_microbatches=count,
        fused_attention=fused_attention and device.type == "cpu",
    )
    split = lowerer.after("split", target)
    stages = split.stages[0, 0]
    n_nodes = sum(len(stage.module.graph.nodes) for stage in stages.stages)
    target = replace(target, inline="all" if is_inlined(plan, n_nodes, count) else "none")
    differentiation = _differentiation(traced, stages)
    if differentiation is not None:
        schedule = schedule_of(plan, count)
        target = replace(target, kind="train_step", differentiation=differentiation, share=True, schedule=schedule)
    programs, represented = representatives_of(lowerer, target)
    return Timed(programs, Representatives(plan.grid, represented), split.parts[0][0].part.n_row_parts)


def _graph_for_microbatch(traced: Traced, plan: Plan) -> ModelGraph:
    """Return the graph that ``partition`` lowers; with numbers for sizes, which are faster to lower, where the programs stay the same.

    Layouts are chosen by the sizes of the whole batch. They would differ for those of one of several microbatches.
    """
    graph = traced.graph
    size, rest = divmod(plan.batch_size, plan.n_microbatches)
    if graph.batch is not None and not rest and (plan.n_microbatches == 1 or plan.grid.cutting.size == 1):
        return fix_batch(graph, size)
    if graph.batch is None and size != graph.batch_size:
        kwargs = traced.kwargs if traced.args is not None else None
        return trace(traced.model, traced.args, kwargs, graph.training, size, graph.autocast, batch_dims=traced.batch_dims)
    return graph


def _differentiation(traced: Traced, stages: SplitModel) -> Differentiation | None:
    """Return the differentiation of a training step: of every result that autograd tracks, by the trainable parameters; None if none."""
    if not stages.graph.training:
        return None
    trainable = {name for name, original in traced.graph.parameters.items() if traced.model.get_parameter(original).requires_grad}
    outputs = frozenset(stages.returned) & values_requiring_gradient(stages, frozenset(trainable))
    return Differentiation(outputs, frozenset(), frozenset(trainable)) if outputs else None


def is_uniform(mesh: Mesh, cluster: Cluster) -> bool:
    """Return whether all devices are equal, and all groups along the same mesh dimensions have the same levels of links."""
    if any(device != cluster.devices[0] for device in cluster.devices[: mesh.size]):
        return False
    if isinstance(cluster.links, Link):
        return True
    if isinstance(cluster.links, Mapping):
        return False
    for count in range(1, len(mesh.names) + 1):
        for names in itertools.combinations(mesh.names, count):
            groups = {mesh.group(rank, names) for rank in range(mesh.size)}
            if len({_levels_of_ring(group, cluster.links) for group in groups}) > 1:
                return False
    return True


def _levels_of_ring(group: Sequence[int], levels: Sequence[Level]) -> tuple[int, ...]:
    """Return the index of the level of links between each rank of a group and the next, around the ring."""
    neighbours = zip(group, (*group[1:], group[0]), strict=True)
    return tuple(
        next(index for index, level in enumerate(levels) if rank // level.size == other // level.size) for rank, other in neighbours
    )


def is_inlined(plan: Plan, n_forward_nodes: int, n_microbatches: int) -> bool:
    """Return whether the programs of a plan are short enough to be simulated with their stages inlined.

    Stages of a single pipeline are calls in any case. Each of the ``n_forward_nodes`` of a pipeline's stages is inlined once forward and
    about twice backward for each microbatch.
    """
    n_pipelines = plan.grid.cutting.size
    return n_pipelines == 1 or 3 * n_forward_nodes * n_microbatches * n_pipelines <= _MOST_NODES
