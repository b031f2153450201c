"""Find the repeated blocks of a deep model in its sequence of nodes, and fold them.

    embedding  | norm linear ... add | norm linear ... add | ... | norm linear ... add | norm head
                 copy 0                copy 1                      copy n - 1

Nodes have equal signatures if they do the same to values of the same shapes (``signatures``). The length of a block is a frequent distance
between equal signatures (``periods``). A block begins where a module does (``border_depth``).

Folding keeps the first, the second and the last copy of a block; the second stands for the rest.

    embedding | block 0 | block 1 | block 2 | ... | block 95 | norm, head          3,278 nodes
    embedding | block 0 | block 1 |                 block 95 | norm, head            116 nodes, block 1 stands for 94

Axes, layouts and prices are then computed for the remaining nodes alone. A run ends where copies differ: in an operation, a size or an
input. A copy reads its own parameters, values of itself and of the copy before it, and values that all copies read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from passes.graph.equivalence import COPY, call_key
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.provenance import module_path
from passes.graph.schemas import node_leaves
from passes.ir.graph import ModelGraph

_PERIODS = 6
"""How many lengths of a block are tried, the most frequent distances between equal signatures first."""


@dataclass(frozen=True)
class Run:
    """``count`` copies of ``length`` nodes from ``start`` on."""

    start: int
    length: int
    count: int

    def copy_of(self, position: int) -> int:
        """Return the number of the copy that contains a position; -1 before the run, ``count`` after it."""
        return min(max((position - self.start) // self.length, -1), self.count) if position >= self.start else -1


def signatures(nodes: Sequence[fx.Node], kind: Callable[[fx.Node], str], own: Callable[[fx.Node], Hashable] = lambda _: None) -> list[int]:
    """Return a number for each node: equal for nodes that do the same to values of the same shapes and of the same ``kind``.

    Args:
        own: a property in which nodes of equal numbers agree.
    """
    numbers: dict[Hashable, int] = {}
    forms: dict[fx.Node, Hashable] = {}

    def form_of(node: fx.Node) -> Hashable:
        if node not in forms:
            forms[node] = kind(node), COPY(node.meta.get("val"))
        return forms[node]

    result = []
    for node in nodes:
        key = call_key(node, form_of), form_of(node), own(node)
        result.append(numbers.setdefault(key, len(numbers)))
    return result


def periods(node_signatures: Sequence[int]) -> list[int]:
    """Return distances between nodes of equal signatures, the most frequent first; rare signatures count twice."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    occurrences = Counter(node_signatures)
    for index, signature in enumerate(node_signatures):
        if signature in last:
            is_rare = occurrences[signature] < len(node_signatures) / 8
            distances[index - last[signature]] += 2 if is_rare else 1
        last[signature] = index
    # A block of two equal layers has the sum of the distances between them as its length.
    frequent = [distance for distance, _ in distances.most_common(_PERIODS)]
    sums = [first + second for first in frequent[:3] for second in frequent[:3]]
    return list(dict.fromkeys((*frequent, *sums)))


def longest_run(nodes: Sequence[fx.Node], node_signatures: Sequence[int]) -> Run | None:
    """Return the run that repeats most nodes, by signatures alone; None where nothing repeats."""
    best: Run | None = None
    for period in periods(node_signatures):
        n_pairs = len(node_signatures) - period
        differs = [index for index in range(n_pairs) if node_signatures[index] != node_signatures[index + period]]
        n_equal, start = max((after - before - 1, before + 1) for before, after in pairwise([-1, *differs, n_pairs]))
        length = n_equal + period
        if length < 2 * period:
            continue
        first = min(range(start, start + length % period + 1), key=lambda position: (border_depth(nodes, position), position))
        run = Run(first, period, length // period)
        if best is None or (run.count - 1) * run.length > (best.count - 1) * best.length:
            best = run
    return best


def border_depth(nodes: Sequence[fx.Node], first: int) -> int:
    """Return how many modules contain both a node and its predecessor: a block begins where these are fewest."""
    before, after = (module_path(node).split(".") for node in (nodes[max(first - 1, 0)], nodes[first]))
    if before == after and first:
        return len(after)
    differs = (depth for depth, (left, right) in enumerate(zip(before, after, strict=False)) if left != right)
    return next(differs, min(len(before), len(after)))


# -- fold repeated blocks ----------------------------------------------------------------------------------------------------------


_MIN_COPIES = 5
"""The fewest copies that are folded: three stay."""


@dataclass(frozen=True)
class Folded:
    """A graph without most copies of its blocks.

    Attributes:
        graph: the graph that stays.
        copies: node or placeholder of the second copy -> the nodes that it stands for, itself the first.
        following: node of the last copy -> its counterpart in the second copy.
    """

    graph: ModelGraph
    copies: dict[str, tuple[str, ...]]
    following: dict[str, str]

    @property
    def n_copies(self) -> int:
        """Return how many copies the second one stands for; 1 where nothing was folded."""
        return max((len(names) for names in self.copies.values()), default=1)


def fold_repeats(graph: ModelGraph, own: Callable[[fx.Node], Hashable] = lambda _: None) -> Folded:
    """Fold the longest run of copies; return the graph itself where there is none.

    Args:
        own: a property of nodes in which copies agree.
    """
    nodes = graph.computing_nodes()
    weights = {**graph.parameters, **graph.buffers, **graph.constants}.keys()

    def kind(value: fx.Node) -> str:
        if value.name in weights:
            return "any weight"
        return value.name if value.op == "placeholder" else "value"

    node_signatures = signatures(nodes, kind, own)
    position = {node: index for index, node in enumerate(nodes)}
    leaves = [node_leaves((node.args, node.kwargs)) for node in nodes]

    def repeats(index: int, period: int) -> bool:
        is_equal = node_signatures[index] == node_signatures[index + period]
        return is_equal and _reads_counterparts(leaves[index], leaves[index + period], period, position, weights)

    runs = (_longest_closed_run(nodes, repeats, position, period, weights) for period in periods(node_signatures))
    run = max((run for run in runs if run is not None), key=lambda run: (run.count - 3) * run.length, default=None)
    return Folded(graph, {}, {}) if run is None else _fold_run(graph, nodes, run)


def _longest_closed_run(
    nodes: list[fx.Node], repeats: Callable[[int, int], bool], position: dict[fx.Node, int], period: int, weights: Collection[str]
) -> Run | None:
    """Return the run of copies of ``period`` nodes in the longest repeating sequence, if its copies are closed (``_is_closed``).

    Args:
        repeats: ``(index, period)``: whether the node at ``index + period`` does the same as the one at ``index`` to its counterparts.
    """
    best: tuple[int, int] = (0, 0)  # number of nodes that repeat, and where they start
    start = 0
    for index in range(len(nodes) - period + 1):
        if index < len(nodes) - period and repeats(index, period):
            continue
        best = max(best, (index - start, start), key=lambda pair: pair[0])
        start = index + 1
    length, start = best
    count = length // period + 1
    if count < _MIN_COPIES:
        return None
    runs = [Run(first, period, (start + length + period - first) // period) for first in range(start, start + period)]
    for run in sorted(runs, key=lambda run: (border_depth(nodes, run.start), run.start)):
        if run.count >= _MIN_COPIES and _is_closed(nodes, position, run, weights):
            return run
    return None


def _reads_counterparts(
    inputs: list[fx.Node], next_inputs: list[fx.Node], period: int, position: dict[fx.Node, int], weights: Collection[str]
) -> bool:
    """Return whether each input of a node and that of its counterpart in the next copy are the same, two weights or counterparts."""
    for first, second in zip(inputs, next_inputs, strict=True):
        if first is second:
            continue
        if first.op == "placeholder" or second.op == "placeholder":
            if first.name not in weights or second.name not in weights:
                return False
        elif position[second] != position[first] + period:
            return False
    return True


def _is_closed(nodes: list[fx.Node], position: dict[fx.Node, int], run: Run, weights: Collection[str]) -> bool:
    """Return whether the copies of a run can be left out.

    A copy may read itself, the copy before, and values before the run. Only the next copy may read it, except for the last copy. A
    weight is read by all copies, or by one copy and no node outside of the run.
    """
    readers: dict[fx.Node, set[int]] = {}  # weight -> the copies that read it
    for index in range(run.start, run.start + run.length * run.count):
        copy = run.copy_of(index)
        for leaf in nodes[index].all_input_nodes:
            if leaf.op == "placeholder":
                if leaf.name in weights:
                    readers.setdefault(leaf, set()).add(copy)
            elif 0 <= run.copy_of(position[leaf]) < copy - 1:
                return False
        if copy < run.count - 1:
            for user in nodes[index].users:
                if user.op == "output" or run.copy_of(position[user]) not in (copy, copy + 1):
                    return False
    all_copies = set(range(run.count))
    for weight, copies in readers.items():
        read_outside = any(user.op == "output" or run.copy_of(position[user]) in (-1, run.count) for user in weight.users)
        if copies != all_copies and (len(copies) > 1 or read_outside):
            return False
    return True


def _fold_run(graph: ModelGraph, nodes: list[fx.Node], run: Run) -> Folded:
    """Keep the first copy, the second and the last; the last reads the second instead of the one before it."""

    def node_of(copy: int, offset: int) -> fx.Node:
        return nodes[run.start + copy * run.length + offset]

    copies: dict[str, tuple[str, ...]] = {}
    removed: set[fx.Node] = set()
    replacement: dict[fx.Node, fx.Node] = {}
    for offset in range(run.length):
        counterparts = [node_of(copy, offset) for copy in range(1, run.count - 1)]
        copies[counterparts[0].name] = tuple(node.name for node in counterparts)
        removed.update(counterparts[1:])
        replacement[node_of(run.count - 2, offset)] = counterparts[0]
        for leaves in zip(*(node_leaves((node.args, node.kwargs)) for node in counterparts), strict=True):
            if leaves[0].op == "placeholder" and leaves[0] is not leaves[1]:  # each copy has a parameter of its own
                copies[leaves[0].name] = tuple(leaf.name for leaf in leaves)
                removed.update(leaves[1:])
    following = {node_of(run.count - 1, offset).name: node_of(1, offset).name for offset in range(run.length)}
    return Folded(_remove_nodes(graph, removed, replacement), copies, following)


def _remove_nodes(graph: ModelGraph, removed: set[fx.Node], replacement: Mapping[fx.Node, fx.Node]) -> ModelGraph:
    """Return the graph without some nodes; nodes that read a removed one read its replacement."""
    target = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node not in removed:
            copied[node] = target.node_copy(node, lambda leaf: copied[replacement[leaf] if leaf in removed else leaf])
            copied[node].name = node.name
    names = {node.name for node in target.nodes}
    return replace(
        graph,
        module=LazyGraphModule({}, target, class_name="Folded"),
        parameters={name: original for name, original in graph.parameters.items() if name in names},
        buffers={name: original for name, original in graph.buffers.items() if name in names},
        constants={name: value for name, value in graph.constants.items() if name in names},
    )
