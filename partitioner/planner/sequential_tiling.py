"""Plan sequential tiling on one device: choose the budget, the size up to which values are computed whole.

Larger values are computed tile by tile, again in every sweep that reads them, so a larger budget needs less time and more memory. The
planner takes the largest budget whose peak memory, by liveness over the tiled graphs, is within the limit. The default limit is parameters,
inputs, gradients and optimizer state, and 2/n of the other memory of the untiled model for n tiles. A model in training mode is planned for
a training step, one in evaluation mode for a forward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, fx

from cost_models.cost_model import CostModel
from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import graph_cost
from cost_models.hardware.clusters import Cluster
from cost_models.hardware.units import format_bytes, parse_bytes
from cost_models.memory.liveness import forward_peak, given_bytes, step_peak
from cost_models.memory.optimizer_state import training_bytes
from partitioner.planner.constraints.tile_grid import best_grid
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.make_plan import make_plan
from partitioner.schedules.catalog import find_schedule
from passes.analysis.axes import Axes, find_axes
from passes.autograd.recompute import Recompute
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.errors import ConfigError, InfeasiblePlanError
from passes.ir.graph import ModelGraph
from passes.ir.plan import BY_REGION, Plan
from passes.spmd.halo.boxes import TileGrid
from passes.stages.split import split_stages
from passes.tiling.backward import differentiate_tiles, tiles_requiring_gradient
from passes.tiling.peak_memory import stream_size
from passes.tiling.rewrite import grid_over, tiled_graph


def plan_stream(
    graph: ModelGraph, tiles: int | Sequence[int], cluster: Cluster, request: PlanRequest, cost_model: CostModel | None = None
) -> Plan:
    """Plan sequential tiles.

    Args:
        tiles: how many, or a grid, one number for each dimension of space.
        cluster: the hardware; its first device computes.
        cost_model: prices; None: an analytic roofline.

    Raises:
        ConfigError: the model has no space that the grid could cut, or the schedule does not fit.
        InfeasiblePlanError: no budget keeps the memory under the limit that was given.
    """
    _check_schedule(request)
    axes = find_axes(graph.graph)
    counts = best_grid(axes, tiles) if isinstance(tiles, int) else tuple(tiles)
    grid = grid_over(axes, counts)
    base = make_plan(graph, cluster, dataclasses.replace(request, memory_limit=None), cost_model)
    untiled = base.memory[0] if graph.training else forward_peak(graph)
    n_tiles = math.prod(counts)
    limit = None if request.memory_limit is None else parse_bytes(request.memory_limit)
    permanent = _permanent_bytes(graph, request.optimizer)
    allowed = permanent + min(untiled - permanent, 2 * (untiled - permanent) // n_tiles) if limit is None else limit
    recompute = "full" if base.recompute == BY_REGION else base.recompute  # tiles are the regions
    recomputed = () if recompute == "full" else base.recomputed
    tiled = dataclasses.replace(base, recompute=recompute, regions=(), recomputed=recomputed)
    budget, peak = 0, 0
    for budget in _budgets(graph, axes, grid, allowed - permanent):
        peak = _peak(graph, counts, budget, tiled, request.optimizer)
        if peak <= allowed:
            break
    if limit is not None and peak > limit:
        raise InfeasiblePlanError(
            f"{n_tiles} sequential tiles hold {format_bytes(peak)} at least, {format_bytes(peak - limit)} more than the limit",
            remedy="use more tiles, or a larger limit",
        )
    by_tiles = tiled_graph(graph, counts, budget)
    times = _flops(by_tiles) / max(_flops(graph), 1.0)
    first = by_tiles.computing_nodes()[0].name
    stage = dataclasses.replace(base.stages[0], first_node=first, flops=base.stages[0].flops * times)
    what = "in a training step " if graph.training else ""
    note = (
        f"{' x '.join(map(str, counts))} sequential tiles hold {format_bytes(peak)} {what}instead of {format_bytes(untiled)}, and compute "
        f"{times:.2g} times as much; values of up to {format_bytes(budget)} are computed whole."
    )
    # A step is a forward of 1 and a backward of 2; the tiled backward first recomputes every tile: 2 and 2.
    slower = (2 * times + 2 * times) / 3 if graph.training else times
    tiled = dataclasses.replace(tiled, stages=(stage,), tiles=counts, tile_budget=budget)
    predicted = tiled.predicted(step_time=base.step_time * slower, memory=(peak,), call_memory=(peak,), gap=None, searched="")
    return predicted.predicted(notes=(*base.notes, note))


def _check_schedule(request: PlanRequest) -> None:
    """Raise ConfigError for a schedule that splits backwards, or has several stages on a device."""
    if request.schedule is None:
        return
    kind = find_schedule(request.schedule)
    if kind.splits_backward or not kind.has_one_stage:
        reason = "cuts a backward in two" if kind.splits_backward else "has several stages on a device"
        raise ConfigError(f"schedule {request.schedule!r} {reason}, and sequential tiling has one of each", remedy="leave schedule=None")


def _permanent_bytes(graph: ModelGraph, optimizer: str) -> int:
    """Return the bytes that do not depend on tiles: inputs and parameters; in training also gradients and optimizer state."""
    gradients = sum(value.nbytes for value in _parameters(graph)) if graph.training else 0
    return given_bytes(graph) + gradients + (_state_bytes(graph, optimizer) if graph.training else 0)


def _state_bytes(graph: ModelGraph, optimizer: str) -> int:
    return sum(training_bytes(value.nbytes, value.dtype, optimizer) for value in _parameters(graph))


def _parameters(graph: ModelGraph) -> list[Tensor]:
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder" and node.name in graph.parameters]


def _device(graph: ModelGraph) -> torch.device:
    """Return the device of the first parameter, else of the first buffer or input."""
    values = {node.name: node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"}
    names = (*graph.parameters, *graph.buffers, *values)
    tensors = (values[name] for name in names)
    return next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), torch.device("cpu"))


def _peak(graph: ModelGraph, counts: tuple[int, ...], budget: int, plan: Plan, optimizer: str) -> int:
    """Return the peak bytes of a tiled step, by liveness over its graphs: a forward, in training also its backward.

    Args:
        plan: what is recomputed of the values that are computed whole.
    """
    by_tiles = tiled_graph(graph, counts, budget)
    if not graph.training:
        return forward_peak(by_tiles)
    (stage,) = split_stages(by_tiles, [by_tiles.computing_nodes()[0].name], [_device(graph)], recomputed=plan.recomputed)
    parameters = frozenset(stage.parameters)
    training = differentiate_tiles(stage, parameters, tiles_requiring_gradient(stage, parameters), cast(Recompute, plan.recompute))
    return step_peak(training, by_tiles) + _state_bytes(graph, optimizer)


def _budgets(graph: ModelGraph, axes: Axes, grid: TileGrid, allowed: int) -> Iterator[int]:
    """Yield budgets to try: the largest ones whose estimated peak is within ``allowed`` bytes, at last the one of the least peak."""
    sizes = sorted({_bytes_of_result(node, graph) for node in graph.computing_nodes()}, reverse=True)
    estimates: list[tuple[int, int]] = []  # (peak, budget)
    n_tried = 0
    for budget in sizes:
        estimate = stream_size(graph, axes, grid, budget)
        if estimate.calls > _MOST_CALLS and estimates:
            break
        estimates.append((estimate.peak, budget))
        if estimate.peak <= allowed:
            n_tried += 1
            yield budget
        if n_tried == _MOST_TRIED:
            break
    yield min(estimates)[1]


_MOST_CALLS = 20_000
"""Limit of the tiled graph's calls: small budgets repeat so many that a step would take too long."""

_MOST_TRIED = 3
"""Budgets within the memory by their estimate whose tiled graphs are written and measured."""


def _bytes_of_result(node: fx.Node, graph: ModelGraph) -> int:
    value = node.meta.get("val")
    return bytes_of(value, graph.batch, graph.batch_size) if isinstance(value, Tensor) else 0


def _flops(graph: ModelGraph) -> float:
    numbers = Numbers(graph.batch_size)
    return float(sum(numbers[cost.forward.flops] for cost in graph_cost(graph, differentiate=False).nodes.values()))
