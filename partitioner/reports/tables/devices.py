"""The table of devices: place on the mesh, stages, parameters, work, memory and bytes sent by kind, one row for each rank."""

from __future__ import annotations

import math
import operator
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.hardware.units import format_bytes, format_flops
from partitioner.options.batch_statistics import microbatch_effects
from partitioner.reports.communication.collectives import collectives_of_classes, sent_by_kind
from partitioner.reports.communication.planned import planned_communication, sent_by_place
from partitioner.reports.module_names import module_range
from partitioner.reports.sources import MANY_RANKS, Blocks, Explained
from partitioner.reports.tables.table import align, html_table
from partitioner.schedules.catalog import interleaves
from passes.ir.comm.primitives import send
from passes.ir.graph import ModelGraph
from passes.ir.mesh import mesh_words, pipelines, rank_numbers
from passes.ir.plan import Plan

_HEADING = ("device", "stage", "modules", "parameters", "size", "work forward", "peak memory")
_COLUMNS = "<<<>>>>"
_SENT = "last columns: bytes that it sends in a step"
_FOOTNOTE = f"parameters: held by the rank; work: of all forwards of a step; work and memory: predicted; {_SENT}"
_PLANNED = f"parameters: held by the rank; work: of all forwards of a step; {_SENT}; all is predicted"
_TEXT_WIDTH = 132
_MODULES_WIDTH, _MODULES_WIDTH_BESIDE_PLACE = 52, 32
"""Characters of the column of modules, for the stages of a rank together."""


@dataclass(frozen=True)
class DeviceTable:
    """A table with one row for each rank.

    Attributes:
        headline: the plan in one line.
        rows: the cells, the heading first.
        columns: alignment of the columns, see ``align``.
        footnote: how to read the numbers.
        notes: the hardware of the plan, if the programs run on another; the memory of calls; effects of microbatches on results.
    """

    headline: str
    rows: Sequence[tuple[str, ...]]
    columns: str
    footnote: str
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return the table for a terminal."""
        notes = [textwrap.fill(f"Note: {note}.", _TEXT_WIDTH) for note in self.notes]
        return "\n".join([self.headline, "", *align(self.rows, self.columns), self.footnote, *notes])

    def html(self) -> str:
        """Return the table for a notebook."""
        caption = [f"{self.headline} ({self.footnote})", *(f"{note}." for note in self.notes)]
        return html_table(self.rows, self.columns, caption=" ".join(caption))


def device_table(explained: Explained) -> DeviceTable:
    """Return the table of devices; its last columns are the functions that communicate, with the bytes that a rank sends.

    The place of a rank is shown on a mesh that shards axes; else the number of its stage says it.
    """
    plan, mesh = explained.plan, explained.mesh
    parameters = _parameters_of_ranks(explained.graph, explained.blocks, mesh.size)  # (count, bytes)
    places = {rank: place for ranks in pipelines(mesh) for place, rank in enumerate(ranks)}
    work = [_work_at(plan, places[rank]) for rank in range(mesh.size)]
    sent = _sent_by_plan(explained, places) if explained.is_long else _sent_by_programs(explained)
    kinds = tuple(dict.fromkeys(kind for sizes in sent for kind, size in sizes.items() if size))
    alike: dict[tuple[object, ...], list[int]] = {}  # place, memory, ... -> ranks; of few ranks, each alone
    for rank in range(mesh.size):
        own = (places[rank], parameters[rank], work[rank], plan.memory[rank], *(sent[rank].get(kind, 0) for kind in kinds))
        alike.setdefault(own if mesh.size > MANY_RANKS else (rank,), []).append(rank)
    rows: list[tuple[str, ...]] = []
    width = _MODULES_WIDTH_BESIDE_PLACE if explained.is_cut else _MODULES_WIDTH
    for ranks in alike.values():
        rank = ranks[0]
        stages = {index: stage for index, stage in enumerate(plan.stages) if places[rank] in stage.ranks}
        count, size = parameters[rank]
        rows.append(
            (
                *_ranks_cells(explained, ranks),
                _devices_words([plan.devices[rank] for rank in ranks]),
                ", ".join(map(str, stages)),
                "; ".join(module_range(stage.modules, width // max(len(stages), 1)) for stage in stages.values()),
                f"{count:,}",
                format_bytes(size),
                format_flops(work[rank]),
                format_bytes(plan.memory[rank]),
                *(format_bytes(sent[rank].get(kind, 0)) for kind in kinds),
            )
        )
    totals = (format_bytes(sum(size for _, size in parameters)), format_flops(sum(work)), "")
    sums = (format_bytes(sum(sizes.get(kind, 0) for sizes in sent)) for kind in kinds)
    start, columns = (("rank", "place"), "><") if explained.is_cut else (("rank",), ">")
    total = (*[""] * len(start), "", "", "all ranks", f"{sum(count for count, _ in parameters):,}", *totals, *sums)
    return DeviceTable(
        headline(explained.name, plan, training=explained.graph.training),
        [(*start, *_HEADING, *kinds), *_ends(rows), total],
        columns + _COLUMNS + ">" * len(kinds),
        _PLANNED if explained.is_long else _FOOTNOTE,
        _notes(explained.graph, plan, explained.planned_for),
    )


def _notes(graph: ModelGraph, plan: Plan, planned_for: str) -> list[str]:
    """Return the notes below a table of devices, one sentence each.

    Args:
        planned_for: the hardware that the plan is for; empty if the programs run on it.
    """
    hardware = (
        [f"planned for {planned_for}, whose memory is predicted; the column device says where the programs run"] if planned_for else []
    )
    peaks = ", ".join(dict.fromkeys(map(format_bytes, plan.call_memory)))
    calls = [f"peak memory is that of train_step(); pm(...) and backward() run all forwards first: {peaks} on the ranks"]
    return [*hardware, *(calls if graph.training and interleaves(plan) else []), *microbatch_effects(graph.mixing, plan.n_microbatches)]


def headline(name: str, plan: Plan, *, training: bool) -> str:
    """Return a plan in one line: ``"gpt: pipeline 2, 1F1B, batch of 8 in 4 microbatches, training"``; without a pipeline, no schedule."""
    mesh = mesh_words(plan.grid, plan.replicas) if plan.n_ranks > 1 else "1 device"
    tiles = f", {' x '.join(map(str, plan.tiles))} sequential tiles" if plan.tiles else ""
    schedule = f", {plan.schedule}" if len(plan.stages) > 1 else ""
    cut = f"batch of {plan.batch_size}" + (f" in {plan.n_microbatches} microbatches" if plan.n_microbatches > 1 else "")
    return f"{name}: {mesh}{tiles}{schedule}, {cut}, {'training' if training else 'evaluation'}"


def _work_at(plan: Plan, place: int) -> float:
    """Return the FLOPs of the forwards of a rank at a pipeline position in a step, by the plan: of the largest shard."""
    stages = [stage for stage in plan.stages if place in stage.ranks]
    return sum(stage.flops * len(range(stage.ranks.index(place), plan.n_microbatches, len(stage.ranks))) for stage in stages)


def _sent_by_plan(explained: Explained, places: Mapping[int, int]) -> list[dict[str, int]]:
    """Return for each rank name of a function -> bytes that it sends, by the plan."""
    sent = sent_by_place(explained.plan, planned_communication(explained))
    return [sent[places[rank]] for rank in range(explained.plan.n_ranks)]


def _ranks_cells(explained: Explained, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the cells of equal ranks: their numbers and, on a mesh that shards axes, their place."""
    if not explained.is_cut:
        return (rank_numbers(ranks),)
    coordinate = explained.mesh.coordinate(ranks[0])
    place = ", ".join(f"{name} {coordinate[name]}" for name in explained.mesh.cutting.names) if len(ranks) == 1 else f"{len(ranks)} ranks"
    return rank_numbers(ranks), place


def _devices_words(devices: Sequence[str]) -> str:
    """Return the first device, and ``...`` if others differ."""
    return devices[0] + (" ..." if len(set(devices)) > 1 else "")


def _sent_by_programs(explained: Explained) -> list[dict[str, int]]:
    """Return for each rank name of a function -> bytes that it sends, from the programs of all classes."""
    sent: dict[int, dict[str, int]] = {}
    for of_class, collectives in zip(explained.classes, collectives_of_classes(explained), strict=True):
        messages = sum(node.meta["bytes"] for node in of_class.program.module.graph.nodes if node.target is send)
        of_rank = {**sent_by_kind(collectives), "send": messages}
        sent |= dict.fromkeys(of_class.ranks, of_rank)
    return [sent[rank] for rank in range(explained.plan.n_ranks)]


def _ends(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows of all classes of equal ranks; of many, the first and the last."""
    if len(rows) <= max(_MOST_CLASSES, MANY_RANKS):
        return list(rows)
    half = _MOST_CLASSES // 2
    return [*rows[:half], ("...", *[""] * (len(rows[0]) - 1)), *rows[-half:]]


_MOST_CLASSES = 14


def _parameters_of_ranks(graph: ModelGraph, blocks: Blocks, n_ranks: int) -> list[tuple[int, int]]:
    """Return for each rank the number of parameter elements that it holds, and their bytes."""
    dtypes = {node.name: node.meta["val"].dtype for node in graph.graph.nodes if node.name in graph.parameters}
    counts, sizes = np.zeros((2, n_ranks), np.int64)
    for name, dtype in dtypes.items():
        of_ranks = blocks.get(name, {})
        ranks = np.fromiter(of_ranks, np.int64, len(of_ranks))
        held = np.fromiter(map(math.prod, map(_PART, of_ranks.values())), np.int64, len(of_ranks))
        counts[ranks] += held
        sizes[ranks] += held * dtype.itemsize
    return list(zip(counts.tolist(), sizes.tolist(), strict=True))


_PART = operator.attrgetter("part")
"""Shape of a block; models have a million of them on thousands of ranks."""
