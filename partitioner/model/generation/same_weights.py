"""Lower another graph that computes with the weights of a partitioned model: each stays where it is, with its shards.

first graph, its plan                               second graph: the forward of one token
axes of parameters ("heads" over tensor)     ──>    the axes of the same dimensions of the same parameters
stages by their first nodes                  ──>    between the last reader of an earlier, and the first of a later stage's parameters
tensors of each rank                         ──>    the same tensor objects
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from partitioner.options.batch_rows import Inputs
from partitioner.runtime.state.materialize import state_of_trace
from partitioner.specialize.programs import Programs, Tensors, first_variant
from partitioner.specialize.shard_holders import PlanCuts
from partitioner.specialize.sharded_model import ShardedModel
from partitioner.specialize.trace import Trace
from partitioner.specialize.transfer import stages_where_held
from passes.analysis.axes import Axes
from passes.analysis.axis_names import axes_named, axis_names, batch_axes
from passes.analysis.merge_axes import find_axes_to_cut
from passes.ir.errors import PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan, Stage
from passes.spmd.shard_stages import StoredLayouts


def plan_with_weights(graph: ModelGraph, first: ShardedModel, plan: Plan) -> Plan:
    """Return the plan by which a graph computes with the weights of another, as that is lowered by its own plan.

    Axes that no parameter has, the batch excepted, are not sharded: positions of one token cannot be.
    """
    return dataclasses.replace(
        plan,
        stages=_stages(graph, first, plan),
        axes=tuple(dict.fromkeys(_axes(graph, first, plan))),
        batch_size=graph.batch_size,
        n_microbatches=1,
        weights="",
        tiles=(),
        tile_budget=0,
        halos=(),
    )


def _axes(graph: ModelGraph, first: ShardedModel, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the sharded axes of a graph with their mesh dimensions, in the order of the first graph's."""
    sharded = first.cut.widest
    axes = find_axes_to_cut(graph, plan.grid)
    names, first_names = axis_names(graph, axes), axis_names(sharded.graph, sharded.axes)
    same = _same_axes(graph, axes, sharded.graph, sharded.axes)
    for name, dimension in plan.axes:
        for axis in axes_named(name, first_names):
            yield from ((names[other], dimension) for other in sorted(same.get(axis, ())))


def _same_axes(graph: ModelGraph, axes: Axes, first_graph: ModelGraph, first_axes: Axes) -> dict[int, set[int]]:
    """Return axis of the first graph -> those of the other in the same places of parameters; the batch is the batch."""
    same: dict[int, set[int]] = {}
    placeholders = {name: placeholder for placeholder, name in graph.parameters.items()}
    for placeholder, name in first_graph.parameters.items():
        if name not in placeholders or placeholder not in first_axes.tensors or placeholders[name] not in axes.tensors:
            continue
        for ours, theirs in zip(axes.of(placeholders[name]), first_axes.of(placeholder), strict=True):
            if len(ours) == len(theirs):
                for own, other in zip(ours, theirs, strict=True):
                    same.setdefault(other, set()).add(own)
    for axis in batch_axes(first_graph, first_axes):
        same.setdefault(axis, set()).update(batch_axes(graph, axes))
    return same


# -- stages ------------------------------------------------------------------------------------------------------------------------


def _stages(graph: ModelGraph, first: ShardedModel, plan: Plan) -> tuple[Stage, ...]:
    """Return the plan's stages with the first nodes that they have in a graph.

    Each parameter is read in stages that read it in the first graph.

    Raises:
        PartitionError: there is no such cut.
    """
    names = first.whole.parameters
    stages = stages_where_held(graph, plan.stages, [frozenset(names[each] for each in stage.parameters) for stage in first.stages.stages])
    if stages is None:
        raise PartitionError(
            "the stages of the plan have no place in this graph: it reads their parameters in another order",
            remedy="cut the model between its layers: Constraints(split_spec=...)",
        )
    return stages


# -- programs ----------------------------------------------------------------------------------------------------------------------


def lower_with_weights(
    graph: ModelGraph,
    plan: Plan,
    stored: StoredLayouts,
    first: Trace,
    trace: Callable[[int | None], ModelGraph],
    inputs: Inputs,
) -> Programs:
    """Return the table of programs of a graph, which read the tensors of another trace, and run where that one does.

    Args:
        graph: evaluated, never trained.
        plan: of ``plan_with_weights``.
        stored: how tensors are stored.
        first: the other trace.
        trace: traces the graph for a number of rows.
        inputs: what each process passes.

    Raises:
        ConfigError: a rank computes with a parameter, or with a part of one, that it does not hold.
    """
    cuts = PlanCuts(graph, plan, trace, stored, progress=first.assumed.progress)
    own = state_of_trace(first.state, graph, cuts.holdings(first_variant(graph, plan, inputs), first.state.devices))
    return Programs(graph, plan, cuts, first.runtime, Tensors(own.of_rank), inputs)
