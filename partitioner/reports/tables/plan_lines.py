"""A plan as lines of text, one decision or prediction each."""

from __future__ import annotations

from cost_models.hardware.units import format_bytes, format_flops, format_seconds
from partitioner.planner.search.describe import recomputed_regions
from partitioner.reports.module_names import module_range
from passes.ir.mesh import mesh_words, rank_list
from passes.ir.plan import Plan

__all__ = ["plan_lines"]


def plan_lines(plan: Plan) -> list[str]:
    """Return a plan as lines, one decision or prediction each."""
    lines = [
        f"mesh          {mesh_words(plan.grid, plan.replicas)}",
        f"devices       {', '.join(plan.devices)}",
        f"axes          {', '.join(f'{axis} over {over}' for axis, over in plan.axes) or 'none is cut'}",
        f"schedule      {plan.schedule}",
        f"batch         {plan.batch_size}",
        f"microbatches  {plan.n_microbatches}",
        f"recompute     {recomputed_regions(plan) or plan.recompute}",
        *([f"sums in       {plan.reduce_dtype}"] if plan.reduce_dtype else []),
        f"step time     {format_seconds(plan.step_time)}",
        f"bound by      {plan.prediction.bound_by}",
    ]
    for index, stage in enumerate(plan.stages):
        lines += [
            f"stage {index}       {rank_list(stage.ranks)}, {module_range(stage.modules)}",
            f"  parameters  {stage.parameter_count:,}, {format_bytes(stage.parameter_bytes)}",
            f"  forward     {format_flops(stage.flops)}, {format_seconds(stage.forward_time)}, sends {format_bytes(stage.send_bytes)}",
            f"  backward    {format_seconds(stage.backward_time)}, keeps {format_bytes(stage.activation_bytes)}",
        ]
    lines += [f"peak memory   rank {rank}: {format_bytes(peak)}" for rank, peak in enumerate(plan.memory)]
    return lines + [f"note          {note}" for note in plan.notes]
