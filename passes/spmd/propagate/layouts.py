"""The layouts of a graph: how each call is cut, which layouts it reads and gives, and in which layout each value is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from passes.analysis.axes import returned_values
from passes.analysis.layout_facts import LayoutFacts
from passes.analysis.routed_rows import Route
from passes.ir.layout import Layout

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""For each rank along a mesh dimension, where its interval starts and stops."""


class Cut(NamedTuple):
    """The loop (``factor``) of a call that one mesh dimension cuts, and the cut one of the loop's axes."""

    factor: int
    axis: int


@dataclass(frozen=True)
class Ring:
    """How the keys and values of an attention call go round ranks.

    Attributes:
        dimension: the index of their mesh dimension.
        is_zigzag: whether each rank then has an early and a late piece of the sequence, so that a causal mask spares all the same work.
    """

    dimension: int
    is_zigzag: bool


@dataclass(frozen=True)
class Layouts:
    """The layout of every value: a placement for each dimension of ``mesh``.

    Attributes:
        mesh: name and size of the mesh dimensions that cut axes, outermost first.
        cuts: call -> its cut over each mesh dimension; None: no loop is cut.
        needs: call -> the layout in which it reads each tensor operand; ``"output"`` -> that of each returned node.
        results: node -> the layout of each tensor that it gives, as computed.
        stored: parameter, buffer or constant -> the layout in which ranks hold it.
        varying: parameter -> the mesh dimensions over which every use is Varying: its gradient is reduced over them once, at the end.
        wide: call -> for each mesh dimension, the interval of its result that each rank computes, if that is more than its own part
            (``passes.spmd.halo.wide``); else None.
        fetched: value -> the same for intervals that ranks fetch once for several readers.
        overlapped: calls whose interior is computed during their halo exchange (``passes.spmd.halo.overlap``).
        rings: attention call -> the ranks round which its keys and values go (``decompose.ring_attention``).
        routes: call that is computed where experts are stored -> how rows get there (``decompose.expert_routes``). All that is said of such
            a call holds if each rank receives as many rows as it has.
        casts: cast of a parameter to a smaller type, or view that leads to one -> the parameter (``passes.spmd.commute.parameter_casts``).
        equal_casts: one of them -> an earlier one that is the same value.
    """

    mesh: tuple[tuple[str, int], ...]
    cuts: Mapping[str, tuple[Cut | None, ...]]
    needs: Mapping[str, tuple[Layout, ...]]
    results: Mapping[str, tuple[Layout, ...]]
    stored: Mapping[str, Layout]
    varying: Mapping[str, frozenset[int]]
    wide: Mapping[str, tuple[Intervals | None, ...]] = field(default_factory=dict)
    fetched: Mapping[str, tuple[Intervals | None, ...]] = field(default_factory=dict)
    overlapped: frozenset[str] = frozenset()
    rings: Mapping[str, Ring] = field(default_factory=dict)
    routes: Mapping[str, Route] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    equal_casts: Mapping[str, str] = field(default_factory=dict)


def reads_of_values(facts: LayoutFacts, layouts: Layouts) -> dict[str, list[tuple[str, Layout]]]:
    """Return value -> its readers, each with the layout in which it reads the value."""
    reads: dict[str, list[tuple[str, Layout]]] = {}
    for node in facts.graph.graph.nodes:
        operands = returned_values(node) if node.op == "output" else facts.axes.operands.get(node.name, ())
        for operand, need in zip(operands, layouts.needs.get(node.name, ()), strict=False):
            reads.setdefault(operand.name, []).append((node.name, need))
    return reads
