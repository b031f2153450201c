"""Why this plan: the runner-up plans, the cost of each option that the user fixed, and how far the search proved it optimal.

plan                                           step    beside the chosen  fullest rank  most of the time
data 2 x tensor 2                           1.20 ms               chosen      1.20 GiB  arithmetic
data 4                                      1.31 ms         9.2 % slower      1.61 GiB  the sum of gradients over replicas

choice              price in a step   without it
mode="pipeline"    0.31 ms, +24.0 %   data 4
schedule="GPipe"            nothing   no faster plan was found
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.hardware.units import format_bytes, format_seconds
from partitioner.planner.price_of_pins import Pinned
from partitioner.reports.tables.table import Table
from passes.ir.mesh import TILES
from passes.ir.plan import Plan

__all__ = ["axes_proof", "contenders_section", "fullest_rank", "pinned_section"]


def contenders_section(plan: Plan) -> Table | None:
    """The chosen plan beside others; None where there was no other."""
    if len(plan.prediction.contenders) < 2:
        return None
    rows = [("plan", "step", "beside the chosen", "fullest rank", "most of the time")]
    for number, each in enumerate(plan.prediction.contenders):
        beside = _beside(each.step_time, plan.prediction.contenders[0].step_time) if number else "chosen"
        rows.append((each.words, format_seconds(each.step_time), beside, format_bytes(each.memory), each.spent_on))
    of = "mesh" if len({each.words.partition(",")[0] for each in plan.prediction.contenders}) > 1 else "schedule"
    return Table(rows, "<>>><", f"the best plan of each {of} that was worked out; all is predicted")


def _beside(seconds: float, chosen: float) -> str:
    change = 100 * (seconds / chosen - 1) if chosen else 0.0
    if abs(change) < _AS_FAST:
        return "as fast"
    return f"{change:.1f} % slower" if change > 0 else f"{-change:.1f} % faster"


_AS_FAST = 0.05
"""Percent that are no difference."""


def pinned_section(choices: Sequence[Pinned], plan: Plan) -> Table | None:
    """What the user pinned; None where nothing was."""
    if not choices:
        return None
    rows = [("choice", "price in a step", "without it")]
    rows += [(each.choice, _price(each, plan), each.without) for each in choices]
    return Table(rows, "<><", "price: what a step takes longer than with the best plan without that choice, all others kept; predicted")


def _price(choice: Pinned, plan: Plan) -> str:
    if choice.price is None:
        return "cannot do without"
    if choice.price == 0:
        return "nothing"
    return f"{format_seconds(choice.price)} of {format_seconds(plan.step_time)}"


def fullest_rank(plan: Plan, limits: Sequence[float]) -> str:
    """Return the predicted memory of the rank that uses most of its limit: ``"1.20 GiB of 80.0 GiB on rank 3, the fullest"``."""
    if not plan.memory:
        return ""
    rank = max(range(len(plan.memory)), key=lambda each: plan.memory[each] / limits[each] if limits else plan.memory[each])
    of = f" of {format_bytes(limits[rank])}" if limits else ""
    return f"{format_bytes(plan.memory[rank])}{of} on rank {rank}" + (", the fullest" if len(plan.memory) > 1 else "")


def axes_proof(plan: Plan) -> str:
    """How good the choice of axes is known to be; empty where there was none.

    Tiles may cut any axes; other mesh dimensions those of parameters.
    """
    gap = plan.prediction.axes_gap
    if gap is None:
        return ""
    eligible = "axes" if any(name in TILES for name, _ in plan.mesh) else "axes of parameters"
    if gap == 0:
        return f"of all choices of {eligible} that were priced, the one that takes least"
    return f"another choice of {eligible} takes up to {100 * gap:.2g} % less time"
