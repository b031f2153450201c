"""A line a device: what it computes, what it holds, what it sends."""

from __future__ import annotations

import functools
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.hardware.units import format_bytes, format_flops
from partitioner.options.batch_statistics import microbatch_effects
from partitioner.reports.module_names import module_range
from partitioner.reports.tables.table import align, html_table
from passes.autograd.staged_model import LoweredStages
from passes.emit.communication_plan import sweep_scripts
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.graph import ModelGraph
from passes.ir.mesh import mesh_words
from passes.ir.plan import Plan, Stage
from passes.ir.schedule import ActionKind

__all__ = ["DeviceTable", "dealt", "device_table", "headline", "table_notes"]

_COLUMNS = "><<<>>>>>"
_HEADING = ("rank", "device", "stage", "modules", "parameters", "size", "work forward", "peak memory", "sends forward")
_FOOTNOTE = "work and sends are of all forwards of a step; memory is predicted"
_TEXT_WIDTH = 132
_MODULES_WIDTH = 52
"""Of the column, if the stages of a rank share it: the table then fits 140 columns."""


@dataclass(frozen=True)
class DeviceTable:
    """A line for each rank.

    Attributes:
        headline: the plan in one line.
        rows: the cells, the heading first.
        columns: see ``align``.
        footnote: how to read it.
        notes: the hardware that was planned for, if it is another; what microbatches compute otherwise than the unpartitioned model.
    """

    headline: str
    rows: Sequence[tuple[str, ...]]
    columns: str
    footnote: str
    notes: Sequence[str] = ()

    def text(self) -> str:
        """For a terminal."""
        notes = [textwrap.fill(f"Note: {note}.", _TEXT_WIDTH) for note in self.notes]
        return "\n".join([self.headline, "", *align(self.rows, self.columns), self.footnote, *notes])

    def html(self) -> str:
        """For notebooks."""
        caption = [f"{self.headline} ({self.footnote})", *(f"{note}." for note in self.notes)]
        return html_table(self.rows, self.columns, caption=" ".join(caption))


def device_table(name: str, plan: Plan, lowered: LoweredStages, planned_for: str) -> DeviceTable:
    """The table of a pipeline.

    Args:
        name: of the model.
        lowered: its stages.
        planned_for: the hardware that the plan is for; empty where it is the hardware that runs it.
    """
    notes = table_notes(lowered.graph, plan, planned_for)
    return DeviceTable(headline(name, plan, training=lowered.graph.training), _rows(plan, lowered), _COLUMNS, _FOOTNOTE, notes)


def table_notes(graph: ModelGraph, plan: Plan, planned_for: str) -> list[str]:
    """What stands below a table of devices, a sentence each."""
    hardware = (
        [f"planned for {planned_for}, whose memory is predicted; the column device says where the programs run"] if planned_for else []
    )
    return [*hardware, *microbatch_effects(graph.mixing, plan.n_microbatches)]


def headline(name: str, plan: Plan, *, training: bool) -> str:
    """The plan in one line."""
    mesh = mesh_words(plan.grid, plan.replicas)
    cut = f"batch of {plan.batch_size} in {plan.n_microbatches} microbatch{'es' if plan.n_microbatches > 1 else ''}"
    return f"{name}: {mesh}, {plan.schedule}, {cut}, {'training' if training else 'evaluation'}"


def _rows(plan: Plan, lowered: LoweredStages) -> list[tuple[str, ...]]:
    stages: defaultdict[int, list[tuple[int, Stage]]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            stages[rank].append((index, stage))
    sent = _sent_forward(plan, lowered)
    rows: list[tuple[str, ...]] = [_HEADING]
    for rank, device in enumerate(plan.devices):
        here = stages[rank]
        rows.append(
            (
                str(rank),
                device,
                ", ".join(str(index) for index, _ in here),
                "; ".join(module_range(stage.modules, _MODULES_WIDTH // max(len(here), 1) - 2) for _, stage in here),
                *_numbers([stage for _, stage in here], [len(dealt(stage, rank, plan.n_microbatches)) for _, stage in here]),
                format_bytes(plan.memory[rank]),
                format_bytes(sent[rank]),
            )
        )
    rows.append(("", "", "", "total", *_totals(plan, lowered.graph), "", format_bytes(sum(sent))))
    return rows


def dealt(stage: Stage, rank: int, n_microbatches: int) -> range:
    """The microbatches that a rank computes of a stage."""
    return range(stage.ranks.index(rank), n_microbatches, len(stage.ranks))


def _numbers(stages: Sequence[Stage], counts: Sequence[int]) -> tuple[str, str, str]:
    """Parameters, their bytes, and the floating-point operations of the forwards of a step.

    Args:
        stages: of a rank.
        counts: of each, how many microbatches.
    """
    return (
        f"{sum(stage.parameter_count for stage in stages):,}",
        format_bytes(sum(stage.parameter_bytes for stage in stages)),
        format_flops(sum(stage.flops * count for stage, count in zip(stages, counts, strict=True))),
    )


def _totals(plan: Plan, graph: ModelGraph) -> tuple[str, str, str]:
    """As ``_numbers``, each parameter counted once."""
    parameters = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder" and node.name in graph.parameters]
    return (
        f"{sum(parameter.numel() for parameter in parameters):,}",
        format_bytes(sum(bytes_of(parameter, None, 1) for parameter in parameters)),
        format_flops(sum(stage.flops for stage in plan.stages) * plan.n_microbatches),
    )


def _sent_forward(plan: Plan, lowered: LoweredStages) -> list[int]:
    """For each rank, the bytes of activations that it sends in a step."""
    nodes = {node.name: node for node in lowered.graph.graph.nodes}
    is_fixed = lowered.graph.batch is None
    rows = microbatch_sizes(plan.batch_size, plan.n_microbatches) if not is_fixed else (lowered.graph.batch_size,) * plan.n_microbatches

    @functools.cache
    def size_of(value: str, size: int) -> int:
        return bytes_of(nodes[value].meta["val"], lowered.graph.batch, size)

    sent = [0] * plan.n_ranks
    for script in sweep_scripts(lowered, plan.n_microbatches, ActionKind.FORWARD, share_outputs=False):
        for message in (message for item in script for message in item.sends):
            sent[message.source] += size_of(message.value, rows[message.microbatch or 0])
    return sent
