"""The table of devices of a mesh: coordinate, stages, parameters, work, memory and bytes sent by kind, one row for each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from cost_models.graph_cost import graph_cost
from cost_models.hardware.units import format_bytes, format_flops
from partitioner.reports.communication.collectives import collectives_of_classes, sent_by_kind
from partitioner.reports.module_names import module_range
from partitioner.reports.sources import MANY_RANKS, Blocks, Explained
from partitioner.reports.tables.devices import DeviceTable, headline, table_notes
from passes.autograd.staged_model import SplitModel
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import send
from passes.ir.graph import ModelGraph
from passes.ir.mesh import owning_pipelines, pipelines
from passes.ir.plan import Plan
from passes.ir.tensor_spec import total
from passes.spmd.shard_stages import StagedCut

__all__ = ["mesh_table"]

_HEADING = ("rank", "place", "device", "stage", "modules", "parameters", "size", "work forward", "peak memory")
_COLUMNS = "><<<<>>>>"
_FOOTNOTE = "parameters: held by the rank; work: of all forwards of a step; memory: predicted; last columns: bytes that it sends in a step"


def mesh_table(explained: Explained) -> DeviceTable:
    """Return the table of devices of a model on a mesh; its last columns are the functions that communicate, with bytes sent."""
    plan, mesh = explained.plan, explained.mesh
    parameters = _parameters_of_ranks(explained.graph, explained.blocks, mesh.size)  # (count, bytes)
    work = _work_of_ranks(plan, explained.pipelines, explained.staged)
    places = {rank: place for ranks in pipelines(mesh) for place, rank in enumerate(ranks)}
    sent = _sent_by_programs(explained)
    kinds = tuple(dict.fromkeys(kind for sizes in sent for kind, size in sizes.items() if size))
    rows: list[tuple[str, ...]] = [(*_HEADING, *kinds)]
    for rank, device in enumerate(plan.devices):
        stages = {index: stage for index, stage in enumerate(plan.stages) if places[rank] in stage.ranks}
        coordinate = mesh.coordinate(rank)
        count, size = parameters[rank]
        rows.append(
            (
                str(rank),
                ", ".join(f"{name} {coordinate[name]}" for name in mesh.cutting.names),
                device,
                ", ".join(map(str, stages)),
                "; ".join(module_range(stage.modules, 32 // max(len(stages), 1)) for stage in stages.values()),
                f"{count:,}",
                format_bytes(size),
                format_flops(work[rank]),
                format_bytes(plan.memory[rank]),
                *(format_bytes(sent[rank].get(kind, 0)) for kind in kinds),
            )
        )
    if mesh.size > MANY_RANKS:
        rows = [rows[0], *_by_class(rows[1:])]
    totals = (format_bytes(sum(size for _, size in parameters)), format_flops(sum(work)), "")
    sums = (format_bytes(sum(sizes.get(kind, 0) for sizes in sent)) for kind in kinds)
    rows.append(("", "", "", "", "all ranks", f"{sum(count for count, _ in parameters):,}", *totals, *sums))
    notes = table_notes(explained.graph, plan, explained.planned_for)
    title = headline(explained.name, plan, training=explained.graph.training)
    return DeviceTable(title, rows, _COLUMNS + ">" * len(kinds), _FOOTNOTE, notes)


def _sent_by_programs(explained: Explained) -> list[dict[str, int]]:
    """Return for each rank name of a function -> bytes that it sends, from the programs of all classes."""
    sent: dict[int, dict[str, int]] = {}
    for of_class, collectives in zip(explained.classes, collectives_of_classes(explained), strict=True):
        messages = sum(node.meta["bytes"] for node in of_class.program.module.graph.nodes if node.target is send)
        of_rank = {**sent_by_kind(collectives), "send": messages}
        sent |= dict.fromkeys(of_class.ranks, of_rank)
    return [sent[rank] for rank in range(explained.plan.n_ranks)]


def _by_class(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return one row for all ranks whose cells after rank and place are equal; of many such classes, the first and the last.

    0  tensor 0  cuda:0  0  layers.0-9          0 to 7  8 ranks  cuda:0 ...  0  layers.0-9
    ...                                   ->
    7  tensor 7  cuda:7  0  layers.0-9
    """
    classes: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        classes.setdefault(row[3:], []).append(row)
    found = []
    for cells, members in classes.items():
        ranks, devices = [int(row[0]) for row in members], list(dict.fromkeys(row[2] for row in members))
        place = members[0][1] if len(members) == 1 else f"{len(members)} ranks"
        found.append((_ranks_words(ranks), place, devices[0] + (" ..." if len(devices) > 1 else ""), *cells))
    if len(found) <= _MOST_CLASSES:
        return found
    half = _MOST_CLASSES // 2
    return [*found[:half], ("...", *[""] * (len(found[0]) - 1)), *found[-half:]]


_MOST_CLASSES = 14


def _ranks_words(ranks: Sequence[int]) -> str:
    """Return ``"0 to 7"``, ``"0, 8 ... 56"`` or ``"3"``."""
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]} to {ranks[-1]}" if ranks[-1] - ranks[0] == len(ranks) - 1 else f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"


def _parameters_of_ranks(graph: ModelGraph, blocks: Blocks, n_ranks: int) -> list[tuple[int, int]]:
    """Return for each rank the number of parameter elements that it holds, and their bytes."""
    dtypes = {node.name: node.meta["val"].dtype for node in graph.graph.nodes if node.name in graph.parameters}
    counts, sizes = [0] * n_ranks, [0] * n_ranks
    for name, dtype in dtypes.items():
        for rank, block in blocks.get(name, {}).items():
            count = math.prod(block.part)
            counts[rank] += count
            sizes[rank] += count * dtype.itemsize
    return list(zip(counts, sizes, strict=True))


def _work_of_ranks(plan: Plan, lowered: Sequence[SplitModel], staged: StagedCut) -> list[float]:
    """Return the FLOPs of each rank's forwards in a step; they differ where shards have different sizes.

    ``lowered`` has the stages of every pipeline of the mesh, ``staged.parts`` the graphs of its ranks; a rank counts in its home pipeline.
    """
    work = [0.0] * plan.n_ranks
    flops: dict[int, Mapping[str, sympy.Expr]] = {}  # id of a graph -> node -> FLOPs
    found: dict[tuple[int, int], dict[int, float]] = {}  # (id of a graph, stage) -> rows of a microbatch -> FLOPs
    home = owning_pipelines(plan.grid)
    for number, (stages, ranks, graphs) in enumerate(zip(lowered, pipelines(plan.grid), staged.parts, strict=True)):
        for stage in stages.stages:
            graph = graphs[stages.stage_ranks[stage.index][0]]
            batches = microbatch_sizes(graph.batch_size, plan.n_microbatches) if graph.batch is not None else [1] * plan.n_microbatches
            if id(graph) not in flops:
                flops[id(graph)] = {name: cost.forward.flops for name, cost in graph_cost(graph, differentiate=False).nodes.items()}
            if (id(graph), stage.index) not in found:
                of_stage = sympy.sympify(total(flops[id(graph)].get(node.name, 0) for node in stage.module.graph.nodes))
                found[id(graph), stage.index] = {rows: _with_rows(of_stage, graph, rows) for rows in set(batches)}
            for microbatch, rows in enumerate(batches):
                rank = ranks[stages.rank_of(stage.index, microbatch)]
                if home[rank] == number:
                    work[rank] += found[id(graph), stage.index][rows]
    return work


def _with_rows(flops: sympy.Expr, graph: ModelGraph, rows: int) -> float:
    """Return FLOPs for a number of rows, the only symbol in those of a graph with a symbolic batch."""
    return float(flops.subs(graph.batch, rows) if graph.batch is not None else flops)
