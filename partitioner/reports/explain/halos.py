"""The halo strategy of each segment of layers, beside the price of every other one.

layers             a halo moves      layer by layer  meanwhile         once for all
down.0 ... bottom  once            6 messages  812 us     790 us  1 message  302 us
up.0               in every layer  2 messages  211 us     431 us  1 message  388 us
"""

from __future__ import annotations

from cost_models.hardware.units import format_seconds
from partitioner.reports.module_names import module_range
from partitioner.reports.tables.table import Table
from passes.ir.plan import Plan

__all__ = ["halos_section"]

_WORDS = {"exchange": "in every layer", "overlap": "while it computes", "recompute": "once"}


def halos_section(plan: Plan) -> Table | None:
    """Return the table of the segments of layers for which a halo strategy was chosen; None if there are none."""
    if not plan.halos:
        return None
    rows = [("layers", "a halo moves", "layer by layer", "", "meanwhile", "once for all", "")]
    rows += [
        (
            module_range(halo.modules) if len(halo.modules) < 2 else " ... ".join(name or "(the model itself)" for name in halo.modules),
            _WORDS[halo.strategy],
            _messages(halo.exchange_messages),
            format_seconds(halo.exchange_time),
            format_seconds(halo.overlap_time),
            _messages(halo.recompute_messages),
            format_seconds(halo.recompute_time),
        )
        for halo in plan.halos
    ]
    footnote = (
        "messages: of a forward; times: predicted, forward and backward; meanwhile: borders alone wait; once: the overlap is computed twice"
    )
    return Table(rows, "<<>>>>>", footnote)


def _messages(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"
