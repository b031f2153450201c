"""The readers of values, with the layouts in which they read."""

from __future__ import annotations

from passes.analysis.axes import returned_values
from passes.analysis.layout_facts import LayoutFacts
from passes.ir.layout import Layout
from passes.spmd.propagate.layouts import Layouts

__all__ = ["reads_of_values"]


def reads_of_values(facts: LayoutFacts, layouts: Layouts) -> dict[str, list[tuple[str, Layout]]]:
    """Return value -> its readers, each with the layout in which it reads the value."""
    reads: dict[str, list[tuple[str, Layout]]] = {}
    for node in facts.graph.graph.nodes:
        operands = returned_values(node) if node.op == "output" else facts.axes.operands.get(node.name, ())
        for operand, need in zip(operands, layouts.needs.get(node.name, ()), strict=False):
            reads.setdefault(operand.name, []).append((node.name, need))
    return reads
