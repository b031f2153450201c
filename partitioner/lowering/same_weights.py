"""Lower another graph that computes with the weights of a partitioned model: each stays where it is, sharded as it is.

first graph, its plan                               second graph: the forward of one token
axes of parameters ("heads" over tensor)     ──>    the axes of the same dimensions of the same parameters
stages by their first nodes                  ──>    between the last reader of an earlier, and the first of a later stage's parameters
tensors of each rank                         ──>    the same tensor objects
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, fx

from partitioner.lowering.lowering import Lowering
from partitioner.lowering.shard_holders import PlanCuts
from partitioner.lowering.variants import Lowerings, Variant, first_variant
from partitioner.options.batch_rows import Inputs
from partitioner.runtime.state.parameters import State, state_of_trace
from passes.analysis.axes import Axes
from passes.analysis.axis_names import axes_named, axis_names, batch_axes
from passes.analysis.merge_axes import find_axes_to_cut
from passes.analysis.replicable import replicable_nodes
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.errors import PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan, Stage
from passes.spmd.shard_stages import StoredLayouts

__all__ = ["lower_with_weights", "plan_with_weights"]


def plan_with_weights(graph: ModelGraph, first: Lowering, plan: Plan) -> Plan:
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


def _axes(graph: ModelGraph, first: Lowering, plan: Plan) -> Iterator[tuple[str, str]]:
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


def _stages(graph: ModelGraph, first: Lowering, plan: Plan) -> tuple[Stage, ...]:
    """Return the plan's stages with the first nodes that they have in a graph.

    Each parameter is read in stages that read it in the first graph; of all such cuts the one that sends fewest bytes is taken.

    Raises:
        PartitionError: there is none.
    """
    nodes, names = graph.computing_nodes(), first.whole.parameters
    read_in = [frozenset(names[each] for each in stage.parameters) for stage in first.stages.stages]
    known = frozenset[str]().union(*read_in)
    across = _bytes_across(graph, nodes)
    best: list[float] = [0.0] + [math.inf] * (len(read_in) - 1)  # bytes sent so far, if the present node is in a stage
    entered: list[list[bool]] = []  # whether the best way to a node in a stage begins the stage with it
    for index, node in enumerate(nodes):
        read = known & {graph.parameters[each.name] for each in node.all_input_nodes if each.name in graph.parameters}
        entering = [math.inf, *(bytes_sent + across[index] for bytes_sent in best[:-1])] if index else [math.inf] * len(best)
        entered.append([enters < stays for enters, stays in zip(entering, best, strict=True)])
        best = [min(each) if read <= held else math.inf for *each, held in zip(entering, best, read_in, strict=True)]
    if math.isinf(best[-1]):
        raise PartitionError(
            "the stages of the plan have no place in this graph: it reads their parameters in another order",
            remedy="cut the model between its layers: Constraints(split_spec=...)",
        )
    starts, stage = [0] * len(best), len(best) - 1
    for index in reversed(range(len(nodes))):
        if entered[index][stage]:
            starts[stage], stage = index, stage - 1
    return tuple(dataclasses.replace(each, first_node=nodes[start].name) for each, start in zip(plan.stages, starts, strict=True))


def _bytes_across(graph: ModelGraph, nodes: Sequence[fx.Node]) -> list[float]:
    """Return for each node the bytes that a stage which begins with it receives from earlier ones; infinity if it would read a tuple."""
    replicable, positions = replicable_nodes(graph), {node: index for index, node in enumerate(nodes)}
    changes, within_tuples = [0] * (len(nodes) + 1), set[int]()
    for index, node in enumerate(nodes):
        value = node.meta.get("val")
        last = max((positions[user] for user in node.users if user in positions), default=index)
        if isinstance(value, tuple | list):
            within_tuples.update(range(index + 1, last + 1))
        elif node.name not in replicable and isinstance(value, Tensor):
            size = bytes_of(value, graph.batch, graph.batch_size)
            changes[index + 1] += size
            changes[last + 1] -= size
    return [math.inf if index in within_tuples else size for index, size in enumerate(itertools.accumulate(changes[:-1]))]


# -- programs ----------------------------------------------------------------------------------------------------------------------


def lower_with_weights(
    graph: ModelGraph,
    plan: Plan,
    stored: StoredLayouts,
    state: State,
    trace: Callable[[int | None], ModelGraph],
    inputs: Inputs,
    local_ranks: Sequence[int],
) -> Lowerings:
    """Return the lowerings of a graph, whose programs read the tensors of ``state``.

    Args:
        graph: evaluated, never trained.
        plan: of ``plan_with_weights``.
        stored: how tensors are stored.
        trace: traces the graph for a number of rows.
        inputs: what each process passes.
        local_ranks: the ranks of this process.

    Raises:
        ConfigError: a rank computes with a parameter, or with a part of one, that it does not hold.
    """
    cuts = PlanCuts(graph, plan, trace, stored)
    own = state_of_trace(state, graph, cuts.holdings(first_variant(graph, plan, inputs), state.devices))

    def lower_at(variant: Variant) -> Lowering:
        return Lowering(*cuts.at(variant), plan, state.devices, local_ranks, own.by_rank, own.slots, frozenset(), variant.inputs)

    return Lowerings(graph, plan, lower_at, cuts.traced_for, inputs)
