"""Choose which axes a tensor dimension cuts: those that divide the most work and then move the fewest bytes.

Candidates are the axes of the parameters. Axes that blocks repeat (the ffn of every block) are one candidate: they have the same name, size
and parameters but for the numbers in these. Step by step a candidate is added, dropped or exchanged for another, whatever leaves the least
cost, until nothing helps; then again without those that run through most parameters:

    cost = bytes that changes of layout move + what the share of the work and of the parameters is worth that every rank has whole

A chain of linear layers a - b - c - d is cut at b and at d: then every layer is cut and none reads what another cut does not give.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from partitioner.planner.pace import Pace
from passes.axes import Axes, returned_values
from passes.axis_names import batch_axes
from passes.ir.graph import ModelGraph
from passes.ir.layout import Partial, Replicate, Shard, Varying
from passes.layouts import Layouts, ValueBytes, assign_layouts

__all__ = ["choose_axes", "contractions_of"]


@dataclass(frozen=True)
class _Candidate:
    """Axes that are cut together.

    Attributes:
        span: in how many dimensions of parameters they occur.
    """

    axes: tuple[int, ...]
    span: int


_BANNED = 2
"""How many of the widest candidates are tried without: what runs through everything (the residual stream) is what climbing stops at."""


def choose_axes(
    graph: ModelGraph,
    axes: Axes,
    dimension: str,
    count: int,
    fixed: Sequence[int] = (),
    excluded: Collection[int] = (),
    pace: Pace | None = None,
) -> tuple[int, ...]:
    """The axes that a mesh dimension of so many ranks cuts.

    Args:
        dimension: its name.
        fixed: axes that are cut whatever it costs.
        excluded: axes that are not: another mesh dimension cuts them.
        pace: of the ranks; None: work and parameters are worth a number of messages, whatever the batch.
    """
    value_bytes = ValueBytes(graph)
    contractions = contractions_of(axes, 1 if pace is None else graph.batch_size)

    def layouts_of(chosen: Sequence[int]) -> Layouts:
        return assign_layouts(graph, axes, ((dimension, count),), {dimension: chosen}, (), value_bytes=value_bytes)

    alone = layouts_of(fixed)
    held, cuts_calls = _held_by(alone, fixed), _cuts_calls(alone, fixed)

    def cost(chosen: Sequence[int]) -> float:
        layouts = layouts_of(chosen)
        if not held <= _held_by(layouts, fixed) or (cuts_calls and not _cuts_calls(layouts, fixed)):
            return math.inf
        return _cost(graph, axes, layouts, contractions, value_bytes, pace)

    candidates = axis_groups(graph, axes, count, {*fixed, *excluded})
    found = _search(candidates, tuple(fixed), cost)
    if found or not candidates:
        return found
    # Nothing is worth its messages, but a cut was asked for: the one that costs least.
    return min(candidates, key=lambda candidate: cost(candidate.axes)).axes


def _held_by(layouts: Layouts, wanted: Sequence[int]) -> frozenset[str]:
    """The parameters that ranks hold cut by one of the axes: what else is cut must not take their place."""
    return frozenset(
        name for name, layout in layouts.stored.items() if any(isinstance(place, Shard) and place.axis in wanted for place in layout)
    )


def _cuts_calls(layouts: Layouts, wanted: Sequence[int]) -> bool:
    """Whether one of the axes cuts any call: space that a convolution is cut by, where its channels could be cut as well."""
    return any(cut is not None and cut.axis in wanted for cuts in layouts.cuts.values() for cut in cuts)


def _search(candidates: Sequence[_Candidate], start: tuple[int, ...], cost: Callable[[Sequence[int]], float]) -> tuple[int, ...]:
    """Climb; then climb once more without one that runs through most parameters, for as long as that ends better."""
    known: dict[frozenset[_Candidate], float] = {}

    def cost_of(selection: Sequence[_Candidate]) -> float:
        key = frozenset(selection)
        if key not in known:
            known[key] = cost((*start, *(axis for candidate in selection for axis in candidate.axes)))
        return known[key]

    best = _climb(candidates, (), cost_of)
    banned = frozenset[_Candidate]()
    while True:
        others = []
        for taken in sorted(best, key=lambda each: -each.span)[:_BANNED]:
            without = banned | {taken}
            left = [candidate for candidate in candidates if candidate not in without]
            others.append((without, _climb(left, tuple(each for each in best if each != taken), cost_of)))
        without, other = min(others, key=lambda pair: cost_of(pair[1]), default=(banned, best))
        if cost_of(other) >= cost_of(best):
            return (*start, *(axis for candidate in best for axis in candidate.axes))
        best, banned = other, without


def _climb(
    candidates: Sequence[_Candidate], chosen: tuple[_Candidate, ...], cost_of: Callable[[Sequence[_Candidate]], float]
) -> tuple[_Candidate, ...]:
    """Add or drop the candidate that helps most, or else exchange one, until nothing helps."""
    while True:
        left = [candidate for candidate in candidates if candidate not in chosen]
        dropped = [tuple(other for other in chosen if other != candidate) for candidate in chosen]
        best = min((*((*chosen, candidate) for candidate in left), *dropped), key=cost_of, default=chosen)
        if cost_of(best) >= cost_of(chosen):
            best = min(((*rest, candidate) for rest in dropped for candidate in left), key=cost_of, default=chosen)
        if cost_of(best) >= cost_of(chosen):
            return chosen
        chosen = best


def axis_groups(graph: ModelGraph, axes: Axes, count: int, decided: Collection[int]) -> list[_Candidate]:
    batch = batch_axes(graph, axes)
    signatures: dict[int, list[str]] = {}
    for name, original in graph.parameters.items():
        for dimension, each in enumerate(axes.of(name) if name in axes.tensors else ()):
            for axis in each:
                signatures.setdefault(axis, []).append(f"{re.sub(r'[0-9]+', '*', original)}:{dimension}")
    groups: dict[tuple[object, ...], list[int]] = {}
    for axis, signature in signatures.items():
        size = axes.sizes[axis]
        if axis in batch or axis in decided or not isinstance(size, int) or size < count:
            continue
        groups.setdefault((size, tuple(sorted(set(signature)))), []).append(axis)
    return [_Candidate(tuple(group), sum(len(signatures[axis]) for axis in group)) for group in groups.values()]


def _cost(
    graph: ModelGraph, axes: Axes, layouts: Layouts, contractions: Mapping[str, float], value_bytes: ValueBytes, pace: Pace | None
) -> float:
    """What layouts cost, in bytes: what moves, and the share of the work or of the parameters that every rank has whole.

    At a known pace work counts as many bytes as are sent while it is done.
    """
    work = sum(contractions.values())
    bytes_per_run = 0.0 if pace is None else (6 if graph.training else 2) / pace.flops * pace.bandwidth
    if pace is not None and not pace.asked:
        counts = [count for _, count in layouts.mesh]
        parts = {name: math.prod(itertools.compress(counts, layouts.cuts.get(name, ()))) for name in contractions}
        runs = sum(each / parts[name] for name, each in contractions.items())
        return runs * bytes_per_run + _moved_bytes(graph, axes, layouts, value_bytes, pace.latency * pace.bandwidth)
    repeated = sum(runs for name, runs in contractions.items() if not any(layouts.cuts.get(name, ())))
    share = max(repeated / max(work, 1.0), _repeated_parameters(graph, layouts))
    worth = max(len(contractions) * WORTH * MESSAGE, work * bytes_per_run)
    return share * worth + _moved_bytes(graph, axes, layouts, value_bytes, MESSAGE)


WORTH = 10
"""How many messages it is worth to cut one contraction: a hundredth of a model of a hundred contractions, ten."""


def contractions_of(axes: Axes, rows: int = 1) -> dict[str, float]:
    """The calls that multiply and add, and how often, for a batch of so many rows."""
    found = {}
    for name, loops in axes.loops.items():
        if len(loops.operands) > 1 and any(each.reduction == "sum" for each in loops.factors):
            found[name] = math.prod(float(factor.size) if isinstance(factor.size, int) else float(rows) for factor in loops.factors)
    return found


def _repeated_parameters(graph: ModelGraph, layouts: Layouts) -> float:
    sizes: dict[str, int] = {node.name: node.meta["val"].numel() for node in graph.graph.nodes if node.name in graph.parameters}
    whole = sum(size for name, size in sizes.items() if not any(isinstance(place, Shard) for place in layouts.stored[name]))
    return whole / max(sum(sizes.values()), 1)


def _moved_bytes(graph: ModelGraph, axes: Axes, layouts: Layouts, value_bytes: ValueBytes, message: float) -> float:
    """Bytes that changes of layout move, forward and backward; ``message``: what one costs that moves nothing."""
    moved: dict[tuple[str, object], float] = {}
    for node in graph.graph.nodes:
        if node.name not in layouts.needs:
            continue
        operands = returned_values(node) if node.op == "output" else axes.operands[node.name]
        for operand, needs in zip(operands, layouts.needs[node.name], strict=True):
            for have, need in zip(layouts.results[operand.name][0], needs, strict=True):
                if have is need or have == need:
                    continue
                times, messages = _CHANGES.get((type(have), type(need)), (0.0, 0))
                moved[operand.name, "sum" if isinstance(have, Partial) else need] = times * value_bytes.of(operand) + messages * message
        for cut in layouts.cuts.get(node.name, ()):
            if cut is not None and axes.loops[node.name].factors[cut.factor].reduction == "whole":
                moved[node.name, "inside"] = _MESSAGES_INSIDE * message
    return sum(moved.values())


MESSAGE = 2.0**20
"""What a message costs whatever it moves, in bytes: a few microseconds of a fast link, as much as a millisecond of a slow one."""

_MESSAGES_INSIDE = 4
"""How many small messages an operation that reduces inside sends, forward and backward."""

_CHANGES: Mapping[tuple[type, type], tuple[float, int]] = {
    (Partial, Replicate): (2.0, 1),
    (Partial, Varying): (4.0, 2),
    (Partial, Shard): (2.0, 2),
    (Shard, Replicate): (1.0, 1),
    (Shard, Varying): (2.0, 2),
    (Shard, Shard): (1.0, 2),
    (Replicate, Shard): (1.0, 1),
    (Replicate, Varying): (2.0, 1),
}
"""How often a change of layout moves the value, forward and backward, for many ranks; and in how many messages."""
