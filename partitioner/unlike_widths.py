"""Stages of unlike width: what they cannot share."""

from __future__ import annotations

from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.stages import stage_of_nodes

__all__ = ["check_unlike_widths", "shared_by_unlike_stages"]


def check_unlike_widths(graph: ModelGraph, plan: Plan) -> None:
    """Each rank sums its part of a gradient with the other ranks that hold the same part: of stages of unlike width none does.

    Args:
        graph: the model.
        plan: of it.

    Raises:
        ConfigError: stages of unlike width read one parameter.
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
    """The error of a parameter that stages of unlike width read."""
    return ConfigError(
        f"{name} is read in stages on {one} and on {other} ranks of the tensor dimension, which would hold unlike parts of it",
        remedy="give these stages as many ranks, or cut so that one stage reads it (Constraints.split_spec)",
    )
