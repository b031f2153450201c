"""How runs of layers pay for what their windows read of neighbours: what was chosen, beside the price of either way.

layers             a halo moves  layer by layer         once for all
down.0 ... bottom  once          6 messages  812.3 us   1 message  301.7 us
up.0               every layer   2 messages  210.5 us   1 message  388.0 us
"""

from __future__ import annotations

from cost_models.units import format_seconds
from partitioner.reports.module_range import module_range
from partitioner.reports.table import Table
from passes.ir.plan import Plan

__all__ = ["halos_section"]

_WORDS = {"exchange": "every layer", "recompute": "once"}


def halos_section(plan: Plan) -> Table | None:
    """The runs in which there is a choice."""
    if not plan.halos:
        return None
    rows = [("layers", "a halo moves", "layer by layer", "", "once for all", "")]
    rows += [
        (
            module_range(run.modules) if len(run.modules) < 2 else " ... ".join(name or "(the model itself)" for name in run.modules),
            _WORDS[run.payment],
            _messages(run.exchange_messages),
            format_seconds(run.exchange_time),
            _messages(run.recompute_messages),
            format_seconds(run.recompute_time),
        )
        for run in plan.halos
    ]
    footnote = (
        "messages are of a forward, times of one microbatch, forward and backward, predicted; once: a wider halo, and neighbours compute "
        "the overlap, too"
    )
    return Table(rows, "<<>>>>", footnote)


def _messages(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"
