"""What a plan cannot combine: stages on several ranks with what these cannot compute, submeshes of unlike shape with shared parameters."""

from __future__ import annotations

from torch import fx

from passes.graph.aliasing import mutated_arguments
from passes.graph.provenance import place_of
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.stages.split import stage_of_nodes

__all__ = ["check_shared_stages", "check_stage_degrees", "shared_by_unlike_stages", "written_buffers"]


def written_buffers(graph: ModelGraph) -> dict[fx.Node, list[str]]:
    """The nodes that write buffers from the rows that they see, and the placeholders of these."""
    found = {
        node: [each.name for each in mutated_arguments(node) if each.name in graph.buffers and graph.updates.get(each.name) != "same"]
        for node in graph.computing_nodes()
    }
    return {node: names for node, names in found.items() if names}


def check_shared_stages(graph: ModelGraph, plan: Plan) -> None:
    """Each replica of a stage sees its own microbatches, so what a stage keeps of all of them would be another thing on each.

    Raises:
        ConfigError: a stage on several ranks writes a buffer, as batch normalisation does with running statistics.
    """
    if not plan.replicas:
        return
    stages = stage_of_nodes(graph, plan.first_nodes)
    for node, written in written_buffers(graph).items():
        ranks = plan.stages[stages[node.name]].ranks if node.name in stages else ()
        if len(ranks) > 1:
            raise ConfigError(
                f"{' and '.join(graph.buffers[name] for name in written)} would be other numbers on each of ranks "
                f"{', '.join(map(str, ranks))}, which share microbatches round-robin at stage {stages[node.name]}",
                place=place_of(node),
                remedy='give the stage one rank, cut elsewhere (Constraints.split_spec), or cut the batch: {"pipeline": 2, "data": 2}',
            )


# -- stages of unequal degrees -----------------------------------------------------------------------------------------------------


def check_stage_degrees(graph: ModelGraph, plan: Plan) -> None:
    """Each rank sums its part of a gradient with the other ranks that hold the same part: of stages of unequal degrees none does.

    Raises:
        ConfigError: stages of unequal tensor-parallel degrees read one parameter.
    """
    if not plan.widths:
        return
    stages = stage_of_nodes(graph, plan.first_nodes)
    for node in graph.graph.nodes:
        if node.name in graph.parameters:
            widths = {plan.widths[plan.stages[stages[user.name]].ranks[0]] for user in node.users if user.name in stages}
            if len(widths) > 1:
                raise shared_by_unlike_stages(graph.parameters[node.name], min(widths), max(widths))


def shared_by_unlike_stages(name: str, one: int, other: int) -> ConfigError:
    """The error of a parameter that stages of unequal tensor-parallel degrees read."""
    return ConfigError(
        f"{name} is shared by stages with tensor-parallel degree {one} and {other}; degrees must match",
        remedy="give these stages as many ranks, or cut so that one stage reads it (Constraints.split_spec)",
    )
