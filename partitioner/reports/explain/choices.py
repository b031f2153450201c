"""Why this plan: the runner-up plans, and how far the search proved it optimal.

plan                                           step    beside the chosen  fullest rank  most of the time
data 2 x tensor 2                           1.20 ms               chosen      1.20 GiB  arithmetic
data 4                                      1.31 ms         9.2 % slower      1.61 GiB  the sum of gradients over replicas
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.hardware.units import format_bytes, format_seconds
from partitioner.reports.tables.table import Table
from passes.ir.mesh import TILES
from passes.ir.plan import Contender, Plan

_AS_FAST = 0.05
"""Percent below which two plans count as equally fast."""


def contenders_section(plan: Plan) -> Table | None:
    """Return the table of the chosen plan and its runners-up; None if there are none."""
    contenders = plan.prediction.contenders
    meshes = {contender.words.partition(",")[0] for contender in contenders}
    varied = "mesh" if len(meshes) > 1 else "schedule"
    return _table(contenders, "chosen", f"the best plan of each {varied} that was worked out; all is predicted")


def front_section(plan: Plan) -> Table | None:
    """Return the table of the plans that no other beats in both step time and memory; None if one plan beats all."""
    return _table(plan.prediction.front, "fastest", "by the prices of the search, no plan that was worked out beats one of these in both")


def _table(plans: Sequence[Contender], first: str, footnote: str) -> Table | None:
    """Return a table of plans, their times relative to the first; None if there is one at most."""
    if len(plans) < 2:
        return None
    rows = [("plan", "step", f"beside the {first}", "fullest rank", "most of the time")]
    for number, each in enumerate(plans):
        relative = _relative_time(each.step_time, plans[0].step_time) if number else first
        rows.append((each.words, format_seconds(each.step_time), relative, format_bytes(each.memory), each.spent_on))
    return Table(rows, "<>>><", footnote)


def _relative_time(seconds: float, chosen: float) -> str:
    """Format a time relative to the chosen plan: ``"9.2 % slower"``."""
    change = 100 * (seconds / chosen - 1) if chosen else 0.0
    if abs(change) < _AS_FAST:
        return "as fast"
    return f"{change:.1f} % slower" if change > 0 else f"{-change:.1f} % faster"


def fullest_rank(peaks: Sequence[int], limits: Sequence[float]) -> str:
    """Return the predicted memory of the rank that uses most of its limit: ``"1.20 GiB of 80.0 GiB on rank 3, the fullest"``."""
    if not peaks:
        return ""
    fill = [peak / limits[rank] if limits else peak for rank, peak in enumerate(peaks)]
    rank = max(range(len(fill)), key=fill.__getitem__)
    limit = f" of {format_bytes(limits[rank])}" if limits else ""
    return f"{format_bytes(peaks[rank])}{limit} on rank {rank}" + (", the fullest" if len(peaks) > 1 else "")


def axes_proof(plan: Plan) -> str:
    """Return how far the choice of sharded axes is proven optimal; empty if there was no choice.

    Tile dimensions of a mesh may shard any axis, others only axes of parameters.
    """
    gap = plan.prediction.axes_gap
    if gap is None:
        return ""
    eligible = "axes" if any(name in TILES for name, _ in plan.mesh) else "axes of parameters"
    if gap == 0:
        return f"of all choices of {eligible} that were priced, the one that takes least"
    return f"another choice of {eligible} takes up to {100 * gap:.2g} % less time"
