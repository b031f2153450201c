"""Leave out repeated blocks: of a run of copies of one block the first, the second and the last stay, the second stands for the rest.

    embedding | block 0 | block 1 | block 2 | ... | block 95 | norm, head          3,278 nodes
    embedding | block 0 | block 1 |                 block 95 | norm, head            116 nodes, block 1 stands for 94

What is asked of every node (axes, layouts, prices) is asked of the few that stay. A run ends where copies differ: in an operation, a size,
or in what they read. A copy reads its own parameters, values of itself and of the copy before it, and what all copies read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from torch import fx

from passes.ir.graph import ModelGraph
from passes.lazy_graph_module import LazyGraphModule
from passes.operators import node_leaves
from passes.repeats import Run, border_depth, periods, signatures

__all__ = ["Folded", "fold_repeats"]

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
