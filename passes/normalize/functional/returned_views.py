"""Find the results of a model that are views of one tensor, so that the caller gets views of one tensor, too.

    forward      y = linear(x); return y, y.unsqueeze(0), x.view(-1)
    program      (y, unsqueeze, view)          values, which ranks send and gather apart
    the caller   y, y.unsqueeze(0)             taken of y again, by the calls of the graph
                 x.view(-1)                    taken of the caller's own x

What the caller writes into one of them, the others show, and autograd sees, as with the model. Results that have no element of memory in
common are left apart. If the tensor that they are views of is no result itself, it becomes one: ``add_bases``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.aliasing import memory_key, viewed_node
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.symbolic_sizes import size_at
from passes.normalize.randomness.draw_order import memory_order


@dataclass(frozen=True, eq=False)
class ReturnedViews:
    """Results that are views of one tensor.

    Attributes:
        base: the node of this tensor: a result, or an input.
        order: its dimensions, outermost in memory first.
        views: the other results.
        module: (base, batch) -> the values of ``views``.
    """

    base: str
    order: tuple[int, ...]
    views: tuple[str, ...]
    module: fx.GraphModule


def add_bases(graph: fx.Graph, inputs: Collection[str]) -> int:
    """Append each tensor that results are views of, and that is no result or input, to the results; return how many there are."""
    output = graph.output_node()
    (results,) = output.args
    assert isinstance(results, tuple | list)
    bases = [base for base, _ in _groups(graph, inputs) if base not in results and base.name not in inputs]
    output.args = ((*results, *bases),)
    return len(bases)


def returned_views(graph: fx.Graph, inputs: Collection[str]) -> tuple[ReturnedViews, ...]:
    """Return the results that are views of another result, or of an input, in a graph of which ``add_bases`` has run."""
    return tuple(
        ReturnedViews(base.name, tuple(memory_order(base.meta["val"])), tuple(view.name for view in views), _replay(base, views))
        for base, views in _groups(graph, inputs)
    )


def views_of_state(graph: fx.Graph, inputs: Collection[str]) -> dict[str, str]:
    """Return the results that are views of a parameter, a buffer or a constant, or such a tensor itself -> its placeholder."""
    written = {node.args[1]: node.all_input_nodes[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    last = {node.name: list(_chain(node))[-1] for node in graph.output_node().all_input_nodes}
    roots = {name: written.get(node, node) for name, node in last.items()}  # the new value of a buffer is the buffer
    return {name: root.name for name, root in roots.items() if root.op == "placeholder" and root.name not in {"batch", *inputs}}


def _groups(graph: fx.Graph, inputs: Collection[str]) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield each tensor that several results are views of, or an input is, and these results."""
    chains: dict[fx.Node, dict[fx.Node, list[fx.Node]]] = {}
    for node in graph.output_node().all_input_nodes:
        chain = list(_chain(node))
        chains.setdefault(chain[-1], {})[node] = chain
    for root, found in chains.items():
        if root.op == "placeholder":
            if root.name in inputs:
                yield root, [node for node in found if node is not root]
            continue
        pairs = [pair for pair in itertools.combinations(found, 2) if not _are_apart(*pair, root)]
        shared = {node: found[node] for pair in pairs for node in pair}
        if shared:
            base = next(node for node in next(iter(shared.values())) if all(node in chain for chain in shared.values()))
            yield base, [node for node in shared if node is not base]


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, the node that it is a view of, and so on."""
    yield node
    while (parent := viewed_node(node)) is not None and _can_be_replayed(node, parent):
        yield parent
        node = parent


def _can_be_replayed(node: fx.Node, parent: fx.Node) -> bool:
    """Return whether a view reads no tensor except its base."""
    call = node.args[0] if node.target is operator.getitem else node
    assert isinstance(call, fx.Node)
    return all(source is parent or not isinstance(source.meta.get("val"), Tensor) for source in call.all_input_nodes)


def _replay(base: fx.Node, views: list[fx.Node]) -> fx.GraphModule:
    """Return the graph (base, batch) -> views."""
    graph = fx.Graph()
    copies = {base: graph.placeholder("base")}
    batch = graph.placeholder("batch")

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copy(source)
            copies[node] = batch if node.op == "placeholder" else graph.node_copy(node, copies.__getitem__)
        return copies[node]

    graph.output(tuple(copy(node) for node in views))
    return LazyGraphModule({}, graph, class_name="Views")


def _are_apart(left: fx.Node, right: fx.Node, root: fx.Node) -> bool:
    """Return whether two views of a tensor have provably no common element: one dimension separates them."""
    one, other = (_box(node.meta["val"], root.meta["val"]) for node in (left, right))
    return any(end <= other_begin or other_end <= begin for (begin, end), (other_begin, other_end) in zip(one, other, strict=False))


def _box(view: Tensor, base: Tensor) -> list[tuple[int, int]]:
    """Return begin and end of a view in each dimension of its base, outermost in memory first; an empty list if it is no such box."""
    if view.dtype != base.dtype or memory_key(view) != memory_key(base):
        return []
    dimensions = sorted(((_number(stride), _number(size)) for size, stride in zip(base.shape, base.stride(), strict=True)), reverse=True)
    steps = {_number(stride): _number(size) for size, stride in zip(view.shape, view.stride(), strict=True) if _number(size) != 1}
    offset = _number(view.storage_offset()) - _number(base.storage_offset())
    box: list[tuple[int, int]] = []
    for stride, size in ((stride, size) for stride, size in dimensions if size != 1 and stride):
        begin, offset = divmod(offset, stride)
        length = steps.pop(stride, 1)
        if begin + length > size:
            return []
        box.append((begin, begin + length))
    return [] if steps or offset else box


def _number(size: int | torch.SymInt | Any) -> int:
    """Return a size as it was in the trace."""
    return size_at(size, None, 0)
