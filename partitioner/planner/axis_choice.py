"""Choose which axes a tensor dimension cuts: those that divide the most work and then move the fewest bytes.

Candidates are the axes of the parameters. Axes that blocks repeat (the ffn of every block) are one candidate: they have the same name, size
and parameters but for the numbers in these. Step by step a candidate is added, dropped or exchanged for another, whatever leaves the least
cost, until nothing helps:

    cost = (multiply-adds that no rank is spared, bytes that changes of layout move)

A chain of linear layers a - b - c - d is cut at b and at d: then every layer is cut and none reads what another cut does not give.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from passes.axes import Axes, returned_values, tensor_operands
from passes.axis_names import batch_axes
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Replicate, Shard, Varying
from passes.layouts import Layouts, assign_layouts
from passes.size_expression import bytes_of

__all__ = ["choose_axes", "layout_cost"]

Cost = tuple[float, float]


@dataclass(frozen=True)
class _Candidate:
    """Axes that are cut together."""

    axes: tuple[int, ...]


def choose_axes(graph: ModelGraph, axes: Axes, dimension: str, count: int, fixed: Sequence[int] = ()) -> tuple[int, ...]:
    """The axes that a mesh dimension of so many ranks cuts.

    Args:
        dimension: its name.
        fixed: axes that are cut whatever it costs.
    """

    def cost(chosen: Sequence[int]) -> Cost:
        return layout_cost(graph, axes, assign_layouts(graph, axes, ((dimension, count),), {dimension: chosen}, ()))

    return _climb(_candidates(graph, axes, count, fixed), tuple(fixed), cost)


def _climb(candidates: Sequence[_Candidate], start: tuple[int, ...], cost: Callable[[Sequence[int]], Cost]) -> tuple[int, ...]:
    """Add, drop or exchange the candidate that helps most, until none does."""
    chosen: tuple[_Candidate, ...] = ()
    known: dict[frozenset[_Candidate], Cost] = {}

    def cost_of(selection: Sequence[_Candidate]) -> Cost:
        key = frozenset(selection)
        if key not in known:
            known[key] = cost((*start, *(axis for candidate in selection for axis in candidate.axes)))
        return known[key]

    while True:
        added = [(*chosen, candidate) for candidate in candidates if candidate not in chosen]
        dropped = [tuple(other for other in chosen if other != candidate) for candidate in chosen]
        exchanged = [(*rest, candidate) for rest in dropped for candidate in candidates if candidate not in chosen]
        best = min((*added, *dropped, *exchanged), key=cost_of, default=chosen)
        if cost_of(best) >= cost_of(chosen):
            return (*start, *(axis for candidate in chosen for axis in candidate.axes))
        chosen = best


def _candidates(graph: ModelGraph, axes: Axes, count: int, fixed: Sequence[int]) -> list[_Candidate]:
    batch = batch_axes(graph, axes)
    signatures: dict[int, list[str]] = {}
    for name, original in graph.parameters.items():
        for dimension, each in enumerate(axes.of(name) if name in axes.tensors else ()):
            for axis in each:
                signatures.setdefault(axis, []).append(f"{re.sub(r'[0-9]+', '*', original)}:{dimension}")
    groups: dict[tuple[object, ...], list[int]] = {}
    for axis, signature in signatures.items():
        size = axes.sizes[axis]
        if axis in batch or axis in fixed or not isinstance(size, int) or size < count:
            continue
        groups.setdefault((size, tuple(sorted(set(signature)))), []).append(axis)
    return [_Candidate(tuple(group)) for group in groups.values()]


def layout_cost(graph: ModelGraph, axes: Axes, layouts: Layouts) -> Cost:
    """What layouts cost: multiply-adds that every rank repeats, and bytes moved forward and backward."""
    return _repeated_work(graph, axes, layouts), _moved_bytes(graph, layouts)


def _repeated_work(graph: ModelGraph, axes: Axes, layouts: Layouts) -> float:
    work = 0.0
    for name, loops in axes.loops.items():
        if any(layouts.cuts.get(name, ())) or len(loops.operands) < 2 or not any(each.reduction == "sum" for each in loops.factors):
            continue
        runs = 1.0
        for factor in loops.factors:
            runs *= float(factor.size if isinstance(factor.size, int) else factor.size.subs(graph.batch, graph.batch_size))
        work += runs
    return work


def _moved_bytes(graph: ModelGraph, layouts: Layouts) -> float:
    moved: dict[tuple[str, object], float] = {}
    for node in graph.graph.nodes:
        if node.name not in layouts.needs:
            continue
        operands = returned_values(node) if node.op == "output" else tensor_operands(node)
        for operand, needs in zip(operands, layouts.needs[node.name], strict=True):
            value = operand.meta["val"]
            lies = layouts.results[operand.name][0]
            for have, need in zip(lies, needs, strict=True):
                if have != need and isinstance(value, Tensor):
                    key = (operand.name, "sum" if isinstance(have, Partial) else need)
                    moved[key] = _times(have, need) * bytes_of(value, graph.batch, graph.batch_size)
    return sum(moved.values())


def _times(have: object, need: object) -> float:
    """How often a change of layout moves the value, forward and backward, for many ranks."""
    table: Mapping[tuple[type, type], float] = {
        (Partial, Replicate): 2.0,
        (Partial, Varying): 4.0,
        (Partial, Shard): 2.0,
        (Shard, Replicate): 1.0,
        (Shard, Varying): 2.0,
        (Shard, Shard): 1.0,
        (Replicate, Shard): 1.0,
        (Replicate, Varying): 2.0,
    }
    return table.get((type(have), type(need)), 0.0)
