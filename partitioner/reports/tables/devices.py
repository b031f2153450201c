"""The table of devices of a pipeline: stages, parameters, work, memory and bytes sent, one row for each rank."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.hardware.units import format_bytes, format_flops
from partitioner.options.batch_statistics import microbatch_effects
from partitioner.reports.communication.planned import PlannedCommunication, planned_communication
from partitioner.reports.module_names import module_range
from partitioner.reports.sources import Explained
from partitioner.reports.tables.table import align, html_table
from partitioner.schedules.catalog import interleaves
from passes.autograd.staged_model import SplitModel
from passes.emit.communication_plan import sweep_scripts
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.graph import ModelGraph
from passes.ir.mesh import mesh_words
from passes.ir.plan import Plan, Stage
from passes.ir.schedule import ActionKind

__all__ = ["DeviceTable", "device_table", "headline", "table_notes"]

_COLUMNS = "><<<>>>>>"
_HEADING = ("rank", "device", "stage", "modules", "parameters", "size", "work forward", "peak memory", "sends forward")
_FOOTNOTE = "work and sends are of all forwards of a step; memory is predicted"
_PLANNED = "work and sends are of all forwards of a step; all is predicted"
_TEXT_WIDTH = 132
_MODULES_WIDTH = 52
"""Of the column, if the stages of a rank share it: the table then fits 140 columns."""


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
    """Return the table of devices of a pipeline."""
    plan, graph = explained.plan, explained.graph
    notes = table_notes(graph, plan, explained.planned_for)
    title = headline(explained.name, plan, training=graph.training)
    return DeviceTable(title, _rows(explained), _COLUMNS, _PLANNED if explained.is_long else _FOOTNOTE, notes)


def table_notes(graph: ModelGraph, plan: Plan, planned_for: str) -> list[str]:
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


def _rows(explained: Explained) -> list[tuple[str, ...]]:
    """Return the heading, a row for each rank, and the totals."""
    plan = explained.plan
    sent = _planned_sends(plan, planned_communication(explained)) if explained.is_long else _sent_forward(plan, explained.lowered)
    rows: list[tuple[str, ...]] = [_HEADING]
    for rank, device in enumerate(plan.devices):
        stages = {index: stage for index, stage in enumerate(plan.stages) if rank in stage.ranks}
        width = _MODULES_WIDTH // max(len(stages), 1) - 2
        rows.append(
            (
                str(rank),
                device,
                ", ".join(map(str, stages)),
                "; ".join(module_range(stage.modules, width) for stage in stages.values()),
                *_numbers_of_rank(rank, list(stages.values()), plan.n_microbatches),
                format_bytes(plan.memory[rank]),
                format_bytes(sent[rank]),
            )
        )
    rows.append(("", "", "", "total", *_totals(plan, explained.graph), "", format_bytes(sum(sent))))
    return rows


def _numbers_of_rank(rank: int, stages: Sequence[Stage], n_microbatches: int) -> tuple[str, str, str]:
    """Return a rank's number of parameters, their bytes, and the FLOPs of its forwards in a step.

    The ranks of a replicated stage share the microbatches round-robin.
    """
    counts = [len(range(stage.ranks.index(rank), n_microbatches, len(stage.ranks))) for stage in stages]
    return (
        f"{sum(stage.parameter_count for stage in stages):,}",
        format_bytes(sum(stage.parameter_bytes for stage in stages)),
        format_flops(sum(stage.flops * count for stage, count in zip(stages, counts, strict=True))),
    )


def _totals(plan: Plan, graph: ModelGraph) -> tuple[str, str, str]:
    """Return the numbers of ``_numbers_of_rank`` for the whole model, each parameter counted once."""
    parameters = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder" and node.name in graph.parameters]
    return (
        f"{sum(parameter.numel() for parameter in parameters):,}",
        format_bytes(sum(bytes_of(parameter, None, 1) for parameter in parameters)),
        format_flops(sum(stage.flops for stage in plan.stages) * plan.n_microbatches),
    )


def _planned_sends(plan: Plan, planned: PlannedCommunication) -> list[int]:
    """Return the bytes of activations that each rank sends in a step, by the plan."""
    sent = [0] * plan.n_ranks
    for message in planned.messages:
        ranks = plan.stages[message.source].ranks
        for index, rank in enumerate(ranks):
            sent[rank] += message.bytes * len(range(index, plan.n_microbatches, len(ranks)))
    return sent


def _sent_forward(plan: Plan, lowered: SplitModel) -> list[int]:
    """Return the bytes of activations that each rank sends in a step."""
    graph, n_microbatches = lowered.graph, plan.n_microbatches
    nodes = {node.name: node for node in graph.graph.nodes}
    is_fixed = graph.batch is None
    rows = (graph.batch_size,) * n_microbatches if is_fixed else microbatch_sizes(plan.batch_size, n_microbatches)

    @functools.cache
    def message_bytes(value: str, rows_of_microbatch: int) -> int:
        return bytes_of(nodes[value].meta["val"], graph.batch, rows_of_microbatch)

    sent = [0] * plan.n_ranks
    for script in sweep_scripts(lowered, n_microbatches, ActionKind.FORWARD, share_outputs=False):
        for item in script:
            for message in item.sends:
                sent[message.source] += message_bytes(message.value, rows[message.microbatch or 0])
    return sent
