"""Gathered weights that several stages of a pipeline share, such as a tied embedding: each stage gathers such a weight for itself.

Weights that are gathered once a step stay whole: they are saved activations (``activation_memory``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cost_models.graph_cost import GraphCost
from partitioner.planner.costs.memory.checkpoint_selection import CheckpointSelection
from partitioner.planner.costs.memory.lifetimes import Order, Saving
from partitioner.planner.solvers.stage_memory import Integers


def uses_apart(
    cost: GraphCost, order: Order, selection: CheckpointSelection, unit: Integers, longest: float
) -> tuple[GraphCost, Order, Saving] | None:
    """Return the costs, order and saved values with an allocation for each stage of a gathered weight's uses; None if no weight has two.

    Uses with more than ``longest`` units between them, the length of a stage, are in different stages:

        embedding(ids, w) ... linear(x, w)    ->    embedding(ids, w) ... linear(x, w2)

    Args:
        unit: (steps,) the unit of each step of the order.
    """
    renamed, sources, calls = _numbered(cost, order, unit, longest)
    if not sources:
        return None

    def with_copies(of: Mapping[int, Any]) -> dict[int, Any]:
        return {**of, **{copy: of[each] for copy, each in sources.items() if each in of}}

    def of_calls(of: Mapping[int, Collection[str]]) -> dict[int, Collection[str]]:
        split = {*sources, *sources.values()}
        return {each: calls[each].intersection(names) if each in split else names for each, names in with_copies(of).items()}

    def also(of: frozenset[int]) -> frozenset[int]:
        return of | {copy for copy, each in sources.items() if each in of}

    own = {(sources[copy], name): copy for copy, names in calls.items() if copy in sources for name in names}
    differentiated = {
        name: tuple(tuple(own.get((each, name), each) for each in operand) for operand in operands)
        for name, operands in cost.differentiated.items()
    }
    apart = replace(
        cost,
        allocation_bytes=with_copies(cost.allocation_bytes),
        maker=with_copies(cost.maker),
        part_of=with_copies(cost.part_of),
        differentiated=differentiated,
        gathered=also(cost.gathered),
        gathered_again={each: names for each, names in of_calls(cost.gathered_again).items() if names},
    )
    return apart, renamed, Saving(of_calls(selection.needed), of_calls(selection.savers))


def _numbered(
    cost: GraphCost, order: Order, unit: Integers, longest: float
) -> tuple[list[tuple[str, Sequence[int]]], dict[int, int], dict[int, set[str]]]:
    """Return the order with new allocations for later stages' uses, new allocation -> the weight's, and weight or copy -> its calls."""
    weights = cost.gathered
    last, number, sources = dict[int, int](), dict[int, int](), dict[int, int]()
    renamed, calls = list[tuple[str, Sequence[int]]](), dict[int, set[str]]()
    following = max(cost.allocation_bytes, default=0) + 1
    for step, (name, touched) in enumerate(order):
        for each in weights.intersection(touched):
            if unit[step] - unit[last.get(each, step)] > longest:
                number[each] = following + len(sources)
                sources[number[each]] = each
            last[each] = step
            calls.setdefault(number.get(each, each), set()).add(name)
        renamed.append((name, [number.get(each, each) for each in touched]))
    return renamed, sources, calls
