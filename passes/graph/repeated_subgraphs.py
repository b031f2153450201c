"""Find what repeats in a sequence of nodes: the blocks of a deep model.

    embedding  | norm linear ... add | norm linear ... add | ... | norm linear ... add | norm head
                 copy 0                copy 1                      copy n - 1

Nodes are alike that do the same to values of the same shapes (``signatures``); copies follow each other at the distance of like nodes
(``periods``); a copy begins where a module does (``border_depth``).

Leave out repeated blocks: of a run of copies of one block the first, the second and the last stay, the second stands for the rest.

    embedding | block 0 | block 1 | block 2 | ... | block 95 | norm, head          3,278 nodes
    embedding | block 0 | block 1 |                 block 95 | norm, head            116 nodes, block 1 stands for 94

What is asked of every node (axes, layouts, prices) is asked of the few that stay. A run ends where copies differ: in an operation, a size,
or in what they read. A copy reads its own parameters, values of itself and of the copy before it, and what all copies read alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.provenance import module_path
from passes.graph.schemas import node_leaves
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import ModelGraph

__all__ = ["Folded", "Run", "border_depth", "described", "fold_repeats", "longest_run", "periods", "signatures"]


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


# -- leave out repeated blocks -----------------------------------------------------------------------------------------------------


_LEAST = 5
"""Copies from which on it is worth folding: three stay."""


@dataclass(frozen=True)
class Folded:
    """A graph without most copies of its blocks.

    Attributes:
        graph: what stays.
        copies: node or placeholder of a block that stands for others -> the nodes that it stands for, itself the first.
        following: node of the last copy of a run -> the node of the block that stands for the others which is its counterpart.
    """

    graph: ModelGraph
    copies: dict[str, tuple[str, ...]]
    following: dict[str, str]

    @property
    def n_copies(self) -> int:
        """How many copies the block stands for; 1 where nothing was folded."""
        return max((len(names) for names in self.copies.values()), default=1)


def fold_repeats(graph: ModelGraph) -> Folded:
    """Fold the longest run of copies; the graph itself where there is none."""
    nodes = graph.computing_nodes()
    held = {**graph.parameters, **graph.buffers, **graph.constants}.keys()

    def kind(value: fx.Node) -> str:
        return "held" if value.name in held else value.name if value.op == "placeholder" else "value"

    found = signatures(nodes, kind)
    position = {node: index for index, node in enumerate(nodes)}
    leaves = [node_leaves((node.args, node.kwargs)) for node in nodes]

    def alike(index: int, period: int) -> bool:
        return found[index] == found[index + period] and _read_alike(leaves[index], leaves[index + period], period, position, held)

    runs = (_run(nodes, alike, position, period, held) for period in periods(found))
    run = max((run for run in runs if run is not None), key=lambda run: (run.count - 3) * run.length, default=None)
    if run is None:
        return Folded(graph, {}, {})
    return _folded(graph, nodes, run)


# -- finding a run -------------------------------------------------------------------------------------------------------------------


def _run(
    nodes: list[fx.Node], alike: Callable[[int, int], bool], position: dict[fx.Node, int], period: int, held: Collection[str]
) -> Run | None:
    """The longest run of copies of so many nodes.

    Args:
        alike: whether a node and the one so many behind it do the same to counterparts.
    """
    best: tuple[int, int] = (0, 0)
    start = 0
    for index in range(len(nodes) - period + 1):
        if index < len(nodes) - period and alike(index, period):
            continue
        best = max(best, (index - start, start), key=lambda pair: pair[0])
        start = index + 1
    length, start = best
    count = length // period + 1
    if count < _LEAST:
        return None
    runs = [Run(first, period, (start + length + period - first) // period) for first in range(start, start + period)]
    for run in sorted(runs, key=lambda run: (border_depth(nodes, run.start), run.start)):
        if run.count >= _LEAST and _is_closed(nodes, position, run, held):
            return run
    return None


def _read_alike(one: list[fx.Node], other: list[fx.Node], period: int, position: dict[fx.Node, int], held: Collection[str]) -> bool:
    """Whether what a node reads, and what its counterpart a copy later reads, are counterparts, or the same."""
    for mine, theirs in zip(one, other, strict=True):
        if mine is theirs:
            continue
        if mine.op == "placeholder" or theirs.op == "placeholder":
            if mine.name not in held or theirs.name not in held:
                return False
        elif position[theirs] != position[mine] + period:
            return False
    return True


def _is_closed(nodes: list[fx.Node], position: dict[fx.Node, int], run: Run, held: Collection[str]) -> bool:
    """Whether copies read only themselves, the one before, and what all of them read; and nobody else reads any but the last."""
    own: dict[fx.Node, set[int]] = {}
    for index in range(run.start, run.start + run.length * run.count):
        copy = run.copy_of(index)
        for leaf in nodes[index].all_input_nodes:
            if leaf.op == "placeholder":
                if leaf.name in held:
                    own.setdefault(leaf, set()).add(copy)
            elif 0 <= run.copy_of(position[leaf]) < copy - 1:
                return False
        if copy < run.count - 1:
            for user in nodes[index].users:
                if user.op == "output" or run.copy_of(position[user]) not in (copy, copy + 1):
                    return False
    last = set(range(run.count))
    for leaf, copies in own.items():
        outside = any(user.op == "output" or run.copy_of(position[user]) in (-1, run.count) for user in leaf.users)
        if copies != last and (len(copies) > 1 or outside):
            return False
    return True


# -- leaving copies out --------------------------------------------------------------------------------------------------------------


def _folded(graph: ModelGraph, nodes: list[fx.Node], run: Run) -> Folded:
    def at(copy: int, offset: int) -> fx.Node:
        return nodes[run.start + copy * run.length + offset]

    copies: dict[str, tuple[str, ...]] = {}
    gone: set[fx.Node] = set()
    counterpart: dict[fx.Node, fx.Node] = {}
    for offset in range(run.length):
        of_block = [at(copy, offset) for copy in range(1, run.count - 1)]
        copies[of_block[0].name] = tuple(node.name for node in of_block)
        gone.update(of_block[1:])
        counterpart[at(run.count - 2, offset)] = of_block[0]
        for leaves in zip(*(node_leaves((node.args, node.kwargs)) for node in of_block), strict=True):
            if leaves[0].op == "placeholder" and leaves[0] is not leaves[1]:
                copies[leaves[0].name] = tuple(leaf.name for leaf in leaves)
                gone.update(leaves[1:])
    following = {at(run.count - 1, offset).name: at(1, offset).name for offset in range(run.length)}
    return Folded(_without(graph, gone, counterpart.__getitem__), copies, following)


def _without(graph: ModelGraph, gone: set[fx.Node], counterpart: Callable[[fx.Node], fx.Node]) -> ModelGraph:
    """The graph without some nodes; who reads one of them reads its counterpart."""
    target = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node not in gone:
            copied[node] = target.node_copy(node, lambda leaf: copied[counterpart(leaf) if leaf in gone else leaf])
            copied[node].name = node.name
    names = {node.name for node in target.nodes}
    return replace(
        graph,
        module=LazyGraphModule({}, target, class_name="Folded"),
        parameters={name: original for name, original in graph.parameters.items() if name in names},
        buffers={name: original for name, original in graph.buffers.items() if name in names},
        constants={name: value for name, value in graph.constants.items() if name in names},
    )
