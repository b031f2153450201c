"""How the activations lie that ranks communicate: by axis name, what is sent and what a collective changes.

value                layout                                     becomes
add_4                [batch/data, sequence, hidden]             sent
linear_1 and 7 more  [batch, sequence, hidden] partial over tensor  [batch, sequence, hidden]
"""

from __future__ import annotations

from partitioner.reports.communication.purpose import items_of
from partitioner.reports.communication.value_layouts import ValueLayouts, change_of, is_of_gradient
from partitioner.reports.sources import Explained
from partitioner.reports.tables.table import Table
from passes.ir.comm.primitives import COLLECTIVES, send
from passes.ir.errors import first_few

__all__ = ["activations_section"]


def activations_section(explained: Explained) -> Table | None:
    """Every activation that is communicated, and every gradient of one; those that lie alike in one line. Parameters are told apart."""
    layouts = ValueLayouts(explained)
    held = {*explained.graph.parameters, *explained.graph.buffers, *explained.graph.constants}
    found: dict[tuple[str, str, bool], dict[str, None]] = {}
    for program in explained.programs:
        for node in program.module.graph.nodes:
            if node.target is send and node.meta["message"].kind in ("activation", "gradient"):
                message = node.meta["message"]
                is_gradient = message.kind == "gradient"
                found.setdefault((layouts.of(message.value, gradient=is_gradient), "sent", is_gradient), {})[message.value] = None
            if node.target in COLLECTIVES:
                for item in items_of(node):
                    change = None if item is None else change_of(item)
                    if item is None or change is None or change.value in held:
                        continue
                    before, _, after = layouts.of_change(change, gradient=is_of_gradient(item)).partition(" -> ")
                    found.setdefault((before, after, is_of_gradient(item)), {})[change.value] = None
    rows = [("value", "layout", "becomes")]
    for (before, after, is_gradient), names in found.items():
        rows.append((f"{'gradient of ' if is_gradient else ''}{first_few(list(names), 1)}", before, after))
    return Table(rows, "<<<") if found else None
