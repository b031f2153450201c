"""Layouts of the activations that ranks communicate, by axis name: of values that are sent, and before and after a collective.

value                layout                                     becomes
add_4                [batch/data, sequence, hidden]             sent
linear_1 and 7 more  [batch, sequence, hidden] partial over tensor  [batch, sequence, hidden]
"""

from __future__ import annotations

from partitioner.reports.communication.value_layouts import ValueLayouts, changes_of
from partitioner.reports.sources import Explained
from partitioner.reports.tables.table import Table
from passes.ir.comm.primitives import COLLECTIVES, send
from passes.ir.errors import first_few

__all__ = ["activations_section"]


def activations_section(explained: Explained) -> Table | None:
    """Return the table of communicated activations and gradients of activations, one row for each layout; None if there are none."""
    layouts = ValueLayouts(explained)
    stored = {*explained.graph.parameters, *explained.graph.buffers, *explained.graph.constants}
    names: dict[tuple[str, str, bool], dict[str, None]] = {}  # (layout, becomes, is a gradient) -> names of values
    for of_class in explained.classes:
        for node in of_class.program.module.graph.nodes:
            if node.target is send and node.meta["message"].kind in ("activation", "gradient"):
                message = node.meta["message"]
                is_gradient = message.kind == "gradient"
                names.setdefault((layouts.of(message.value, gradient=is_gradient), "sent", is_gradient), {})[message.value] = None
            if node.target in COLLECTIVES:
                for change, is_gradient in changes_of(node):
                    if change.value not in stored:
                        before, _, after = layouts.of_change(change, gradient=is_gradient).partition(" -> ")
                        names.setdefault((before, after, is_gradient), {})[change.value] = None
    rows = [("value", "layout", "becomes")]
    for (before, after, is_gradient), alike in names.items():
        rows.append((f"{'gradient of ' if is_gradient else ''}{first_few(list(alike), 1)}", before, after))
    return Table(rows, "<<<") if names else None
