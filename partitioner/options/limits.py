"""Refuse plans whose stages cannot be exact: replicated stages that write buffers, parameters shared by stages of unequal degrees."""

from __future__ import annotations

from torch import fx

from passes.graph.aliasing import mutated_arguments
from passes.graph.provenance import place_of
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import rank_list
from passes.ir.plan import Plan
from passes.stages.split import stage_of_nodes


def written_buffers(graph: ModelGraph) -> dict[fx.Node, list[str]]:
    """Return node -> the buffers that it writes, for writes that depend on the rows of a batch, such as running statistics."""
    written: dict[fx.Node, list[str]] = {}
    for node in graph.computing_nodes():
        buffers = [argument.name for argument in mutated_arguments(node) if argument.name in graph.buffers]
        if names := [name for name in buffers if graph.updates.get(name) != "same"]:
            written[node] = names
    return written


def check_shared_stages(graph: ModelGraph, plan: Plan) -> None:
    """Raise ConfigError if a stage on several ranks writes a buffer: each rank sees its own microbatches, and the copies would diverge."""
    if not plan.replicas:
        return
    stages = stage_of_nodes(graph, plan.first_nodes)
    for node, written in written_buffers(graph).items():
        ranks = plan.stages[stages[node.name]].ranks if node.name in stages else ()
        if len(ranks) > 1:
            raise ConfigError(
                f"{' and '.join(graph.buffers[name] for name in written)} would diverge between "
                f"{rank_list(ranks)}, which share microbatches round-robin at stage {stages[node.name]}",
                place=place_of(node),
                remedy='give the stage one rank, cut elsewhere (Constraints.split_spec), or cut the batch: {"pipeline": 2, "data": 2}',
            )


def check_stage_degrees(graph: ModelGraph, plan: Plan) -> None:
    """Raise ConfigError if stages of unequal tensor-parallel degrees read one parameter: gradients of unequal shards cannot be added."""
    if not plan.widths:
        return
    stages = stage_of_nodes(graph, plan.first_nodes)
    for node in graph.graph.nodes:
        if node.name in graph.parameters:
            positions = {plan.stages[stages[user.name]].ranks[0] for user in node.users if user.name in stages}
            degrees = {plan.widths[position] for position in positions}
            if len(degrees) > 1:
                raise shared_by_unlike_stages(graph.parameters[node.name], min(degrees), max(degrees))


def shared_by_unlike_stages(name: str, degree: int, other: int) -> ConfigError:
    """Return the error of a parameter that stages of unequal tensor-parallel degrees read."""
    return ConfigError(
        f"{name} is shared by stages with tensor-parallel degree {degree} and {other}; degrees must match",
        remedy="give these stages as many ranks, or cut so that one stage reads it (Constraints.split_spec)",
    )
