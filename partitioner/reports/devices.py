"""A line a device: what it computes, what it holds, what it sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.units import format_bytes, format_flops
from partitioner.reports.module_range import module_range
from partitioner.reports.table import align, html_table
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan, Stage
from passes.ir.schedule import ActionKind
from passes.lower import LoweredStages
from passes.messages import sweep_scripts
from passes.size_expression import bytes_of

__all__ = ["DeviceTable", "device_table", "headline"]

_COLUMNS = "><<<>>>>>"
_HEADING = ("rank", "device", "stage", "modules", "parameters", "size", "work forward", "peak memory", "sends forward")
_FOOTNOTE = "work and sends are of all forwards of a step; memory is predicted"
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
    """

    headline: str
    rows: Sequence[tuple[str, ...]]
    columns: str
    footnote: str

    def text(self) -> str:
        """For a terminal."""
        return "\n".join([self.headline, "", *align(self.rows, self.columns), self.footnote])

    def html(self) -> str:
        """For notebooks."""
        return html_table(self.rows, self.columns, caption=f"{self.headline} ({self.footnote})")


def device_table(name: str, plan: Plan, lowered: LoweredStages) -> DeviceTable:
    """The table of a pipeline.

    Args:
        name: of the model.
        lowered: its stages.
    """
    return DeviceTable(headline(name, plan, training=lowered.graph.training), _rows(plan, lowered), _COLUMNS, _FOOTNOTE)


def headline(name: str, plan: Plan, *, training: bool) -> str:
    """The plan in one line."""
    mesh = " x ".join(f"{dimension} {size}" for dimension, size in plan.mesh)
    cut = f"batch of {plan.batch_size} in {plan.n_microbatches} microbatch{'es' if plan.n_microbatches > 1 else ''}"
    return f"{name}: {mesh}, {plan.schedule}, {cut}, {'training' if training else 'evaluation'}"


def _rows(plan: Plan, lowered: LoweredStages) -> list[tuple[str, ...]]:
    stages: defaultdict[int, list[tuple[int, Stage]]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        stages[stage.rank].append((index, stage))
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
                *_numbers([stage for _, stage in here], plan.n_microbatches),
                format_bytes(plan.memory[rank]),
                format_bytes(sent[rank]),
            )
        )
    rows.append(("", "", "", "total", *_totals(plan, lowered.graph), "", format_bytes(sum(sent))))
    return rows


def _numbers(stages: Sequence[Stage], n_microbatches: int) -> tuple[str, str, str]:
    """Parameters, their bytes, and the floating-point operations of the forwards of a step."""
    return (
        f"{sum(stage.parameter_count for stage in stages):,}",
        format_bytes(sum(stage.parameter_bytes for stage in stages)),
        format_flops(sum(stage.flops for stage in stages) * n_microbatches),
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
    batch = plan.batch_size if lowered.graph.batch is not None else lowered.graph.batch_size
    parts = 1 if lowered.graph.batch is not None else plan.n_microbatches
    sent = [0] * plan.n_ranks
    for script in sweep_scripts(lowered, 1, ActionKind.FORWARD, share_outputs=False):
        for item in script:
            for message in item.sends:
                sent[message.source] += parts * bytes_of(nodes[message.value].meta["val"], lowered.graph.batch, batch)
    return sent
