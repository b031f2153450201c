"""Stages of unlike width: what they cannot share."""

from __future__ import annotations

import math

from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import STAGES, WIDTH
from passes.ir.plan import Plan
from passes.stages import stage_of_nodes

__all__ = ["check_unlike_widths", "shared_by_unlike_stages"]

_AGAIN = "make the plan again"


def check_unlike_widths(graph: ModelGraph, plan: Plan) -> None:
    """Each rank sums its part of a gradient with the other ranks that hold the same part: of stages of unlike width none does.

    Args:
        graph: the model.
        plan: of it.

    Raises:
        ConfigError: widths and mesh say unlike things, or stages of unlike width read one parameter.
    """
    _check_mesh(plan)
    if not plan.widths:
        return
    stages = stage_of_nodes(graph, plan.first_nodes)
    for node in graph.graph.nodes:
        if node.name in graph.parameters:
            widths = {plan.widths[plan.stages[stages[user.name]].ranks[0]] for user in node.users if user.name in stages}
            if len(widths) > 1:
                raise shared_by_unlike_stages(graph.parameters[node.name], min(widths), max(widths))


def _check_mesh(plan: Plan) -> None:
    """Raise ConfigError where the mesh has not the places and ranks that the plan gives its stages."""
    sizes, widths = dict(plan.mesh), plan.widths
    n_places = math.prod(sizes.get(name, 1) for name in STAGES)
    if widths and (len(widths) != n_places or min(widths) < 1 or len(set(widths)) == 1 or max(widths) != sizes.get(WIDTH)):
        raise ConfigError(f"the plan's widths {widths} do not fit its mesh, {dict(plan.mesh)}", remedy=_AGAIN)
    if plan.grid.size != plan.n_ranks:
        raise ConfigError(f"the plan's mesh has {plan.grid.size} ranks, and it names {plan.n_ranks} devices", remedy=_AGAIN)


def shared_by_unlike_stages(name: str, one: int, other: int) -> ConfigError:
    """The error of a parameter that stages of unlike width read."""
    return ConfigError(
        f"{name} is read in stages on {one} and on {other} ranks of the tensor dimension, which would hold unlike parts of it",
        remedy="give these stages as many ranks, or cut so that one stage reads it (Constraints.split_spec)",
    )
