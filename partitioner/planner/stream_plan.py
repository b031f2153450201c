"""Plan tiles that are computed in turn on one device: how much of the model is computed whole, so that its memory is kept.

What is at most as large as the budget is computed whole; the rest by tiles, again for every sweep that reads it. A larger budget computes
less and holds more. The largest is chosen whose forward, by liveness over the streamed graph, holds no more than the limit; without a
limit, the parameters and inputs and twice an equal share of what else the whole model holds: an eighth, for 16 tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor, fx

from cost_models.cost_model import CostModel
from cost_models.formulas import Numbers
from cost_models.graph_cost import graph_cost
from cost_models.hardware import Cluster
from cost_models.live_memory import forward_peak, given_bytes
from cost_models.units import format_bytes, parse_bytes
from partitioner.planner.make_plan import make_plan
from partitioner.planner.plan_request import PlanRequest
from partitioner.planner.tile_grid import best_grid
from passes.axes import Axes, find_axes
from passes.ir.errors import ConfigError, InfeasiblePlanError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.size_expression import bytes_of
from passes.streaming.keeping import stream_size
from passes.streaming.spans import TileGrid
from passes.streaming.streamed import grid_over, streamed

__all__ = ["plan_stream"]


def plan_stream(
    graph: ModelGraph, tiles: int | Sequence[int], cluster: Cluster, request: PlanRequest, cost_model: CostModel | None = None
) -> Plan:
    """Plan tiles in turn.

    Args:
        graph: the model, in evaluation mode.
        tiles: how many, or a grid, one number for each dimension of space.
        cluster: the hardware; its first device computes.
        request: what the user said.
        cost_model: prices; None: an analytic roofline.

    Raises:
        ConfigError: the model trains, or has no space that the grid could cut.
        InfeasiblePlanError: no budget keeps the memory under the limit that was given.
    """
    if graph.training:
        raise ConfigError(
            "tiles in turn on one device compute a forward, no gradients, and the model is in training mode",
            remedy="pass training=False, or call model.eval() first",
        )
    axes = find_axes(graph.graph)
    counts = best_grid(axes, tiles) if isinstance(tiles, int) else tuple(tiles)
    grid = grid_over(axes, counts)
    whole = forward_peak(graph)
    n_tiles = 1
    for count in counts:
        n_tiles *= count
    limit = None if request.memory_limit is None else parse_bytes(request.memory_limit)
    given = given_bytes(graph)
    wanted = given + min(whole - given, 2 * (whole - given) // n_tiles) if limit is None else limit
    budget = _chosen(graph, axes, grid, wanted - given)
    by_tiles = streamed(graph, counts, budget)
    peak = forward_peak(by_tiles)
    if limit is not None and peak > limit:
        raise InfeasiblePlanError(
            f"{n_tiles} tiles in turn hold {format_bytes(peak)} at least, {format_bytes(peak - limit)} more than the limit",
            remedy="use more tiles, or a larger limit",
        )
    base = make_plan(graph, cluster, dataclasses.replace(request, memory_limit=None), cost_model)
    times = _flops(by_tiles) / max(_flops(graph), 1.0)
    first = by_tiles.computing_nodes()[0].name
    stage = dataclasses.replace(base.stages[0], first_node=first, flops=base.stages[0].flops * times)
    note = (
        f"{' x '.join(map(str, counts))} tiles in turn hold {format_bytes(peak)} instead of {format_bytes(whole)}, and compute {times:.2g} "
        f"times as much; values of up to {format_bytes(budget)} are computed whole."
    )
    return dataclasses.replace(
        base, stages=(stage,), step_time=base.step_time * times, memory=(peak,), notes=(*base.notes, note), tiles=counts, tile_budget=budget
    )


def _chosen(graph: ModelGraph, axes: Axes, grid: TileGrid, wanted: int) -> int:
    """The largest budget that keeps to a number of bytes, or else the one that holds least."""
    sizes = sorted({_largest(node, graph) for node in graph.computing_nodes()}, reverse=True)
    measured: list[tuple[int, int]] = []
    for budget in sizes:
        size = stream_size(graph, axes, grid, budget)
        if size.calls > _MOST_CALLS and measured:
            break
        if size.peak <= wanted:
            return budget
        measured.append((size.peak, budget))
    return min(measured)[1]


_MOST_CALLS = 20_000
"""Beyond that, what is computed again and again takes longer than anybody would wait."""


def _largest(node: fx.Node, graph: ModelGraph) -> int:
    value = node.meta.get("val")
    return bytes_of(value, graph.batch, graph.batch_size) if isinstance(value, Tensor) else 0


def _flops(graph: ModelGraph) -> float:
    numbers = Numbers(graph.batch_size)
    return float(sum(numbers[cost.forward.flops] for cost in graph_cost(graph, differentiate=False).nodes.values()))
