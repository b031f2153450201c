"""Find what repeats in a sequence of nodes: the blocks of a deep model.

    embedding  | norm linear ... add | norm linear ... add | ... | norm linear ... add | norm head
                 copy 0                copy 1                      copy n - 1

Nodes are alike that do the same to values of the same shapes (``signatures``); copies follow each other at the distance of like nodes
(``periods``); a copy begins where a module does (``border_depth``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from passes.provenance import module_path
from passes.size_expression import size_of

__all__ = ["Run", "border_depth", "described", "longest_run", "periods", "signatures"]

_PERIODS = 6
"""How many lengths of a block are tried, the most frequent distances between like nodes first."""


@dataclass(frozen=True)
class Run:
    """``count`` copies of ``length`` nodes from ``start`` on."""

    start: int
    length: int
    count: int

    def copy_of(self, position: int) -> int:
        """Which copy a position is in; -1 before the run, ``count`` behind it."""
        return min(max((position - self.start) // self.length, -1), self.count) if position >= self.start else -1


def signatures(nodes: Sequence[fx.Node], kind: Callable[[fx.Node], str]) -> list[int]:
    """A number for each node: equal for nodes that do the same to values of the same shapes.

    Args:
        kind: what else is asked of a value that two like nodes read.
    """
    numbers: dict[Hashable, int] = {}

    def leaf(value: Any) -> str:
        return f"{kind(value)} {described(value.meta.get('val'))}" if isinstance(value, fx.Node) else repr(value)

    found = []
    for node in nodes:
        arguments = [leaf(value) for value in _leaves((node.args, node.kwargs))]
        found.append(numbers.setdefault((node.target, described(node.meta.get("val")), tuple(arguments)), len(numbers)))
    return found


def _leaves(value: Any) -> Iterator[Any]:
    """What nested arguments hold, how they are nested with it."""
    if isinstance(value, tuple | list):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, Mapping):
        yield tuple(value)
        for each in value.values():
            yield from _leaves(each)
    else:
        yield value


def described(value: object) -> Hashable:
    """What is known of a traced value, as far as copies must agree in it."""
    if isinstance(value, Tensor):
        return (*(str(size_of(size)) for size in value.shape), str(value.dtype), value.requires_grad)
    if isinstance(value, tuple | list):
        return tuple(described(each) for each in value)
    return str(value)


def periods(found: Sequence[int]) -> list[int]:
    """Distances between like nodes, the most frequent first.

    Args:
        found: signatures.
    """
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    rare = Counter(found)
    for index, signature in enumerate(found):
        if signature in last:
            distances[index - last[signature]] += 1 + (rare[signature] < len(found) / 8)
        last[signature] = index
    # A block that holds two like layers repeats at their sum as well.
    frequent = [distance for distance, _ in distances.most_common(_PERIODS)]
    sums = [one + other for one in frequent[:3] for other in frequent[:3]]
    return list(dict.fromkeys((*frequent, *sums)))


def longest_run(nodes: Sequence[fx.Node], found: Sequence[int]) -> Run | None:
    """The run whose copies are most nodes, as far as signatures tell; None where nothing repeats.

    Args:
        found: signatures of the nodes.
    """
    best: Run | None = None
    for period in periods(found):
        differs = [-1, *(index for index in range(len(found) - period) if found[index] != found[index + period]), len(found) - period]
        behind, start = max((after - before, before + 1) for before, after in pairwise(differs))
        length = behind - 1 + period
        if length < 2 * period:
            continue
        first = min(range(start, start + length % period + 1), key=lambda each: (border_depth(nodes, each), each))
        run = Run(first, period, length // period)
        if best is None or (run.count - 1) * run.length > (best.count - 1) * best.length:
            best = run
    return best


def border_depth(nodes: Sequence[fx.Node], first: int) -> int:
    """Through how many modules a border in front of a node goes: blocks begin where it is fewest."""
    before, here = (module_path(node).split(".") for node in (nodes[max(first - 1, 0)], nodes[first]))
    if before == here and first:
        return len(here)
    return next((depth for depth, pair in enumerate(zip(before, here, strict=False)) if pair[0] != pair[1]), min(len(before), len(here)))
