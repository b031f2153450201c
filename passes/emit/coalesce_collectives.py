"""Send several small tensors in one message: gathers for the next calls, and values read only at the end.

    before                                      after

    w1_all = all_gather([w1])                   both = all_gather([w1, w2])
    h = linear(x, w1_all)                       h = linear(x, both[0])
    w2_all = all_gather([w2])                   y = linear(h, both[1])
    y = linear(h, w2_all)

Gathers of parameters are coalesced in the order of their first use, so that a message is about a layer; scattered gradients in the order in
which they are there. Gathers of a forward and repeated gathers of its backward are separate messages. A message is closed when it holds
enough bytes, or when something of it is read before the next one is there; views of it, as of a bias that is stored by heads, move down
with it. Large parts are sent alone, and not copied. What ranks coalesce depends on the largest part of all of them, whether their parts are
even or not; a parameter that is stored in other parts than it is read in is exchanged first, and then gathered with others.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from passes.graph.schemas import views_its_arguments, written_arguments
from passes.ir.comm.primitives import all_gather, all_to_all, reduce_scatter, wait
from passes.ir.torch_private import OpOverload

BUNDLE_BYTES = 4 * 2**20
"""How many bytes a rank gives to coalesced scatters: about where a message stops being dominated by its latency."""

ALONE_BYTES = 2**18
"""Parts of at least this size are sent alone: copying one into a message and out again takes longer than the latency of a message between
processes of one machine. Coalesced gathers hold as much of each rank: the result is in memory whole while any of it is read."""

_GATHERED_BYTES = 32 * 2**20
"""The most bytes that coalesced gathers make, over many ranks."""


def bytes_of_bundle(n_ranks: int) -> int:
    """Return the most bytes that a rank gives to coalesced gathers among so many ranks."""
    return min(ALONE_BYTES, _GATHERED_BYTES // n_ranks)


def coalesce_collectives(graphs: Sequence[fx.Graph]) -> None:
    """Coalesce the gathers and scatters of programs, in place.

    Args:
        graphs: of ranks that start the same collectives: what one of them cannot send together, the others do not either.
    """
    for function in (all_gather, reduce_scatter):
        starts = [[node for node in graph.nodes if node.target is function] for graph in graphs]
        sizes = [max(map(_bytes_in_message, nodes)) for nodes in zip(*starts, strict=True)]
        found = [_bundles(graph, dict(zip(nodes, sizes, strict=True))) for graph, nodes in zip(graphs, starts, strict=True)]
        numbers = [{node: number for number, node in enumerate(each)} for each in starts]
        bundles = [[tuple(map(number.__getitem__, bundle)) for bundle in each] for number, each in zip(numbers, found, strict=True)]
        shared = set(bundles[0]).intersection(*bundles[1:])
        for graph, nodes in zip(graphs, starts, strict=True):
            for bundle in bundles[0]:
                if bundle in shared:
                    _merge(graph, [nodes[number] for number in bundle], at_first=function is all_gather)
    for graph in graphs:
        graph.lint()


def _bundles(graph: fx.Graph, sizes: Mapping[fx.Node, float]) -> list[list[fx.Node]]:
    """Coalesce the starts of one collective into messages of two and more.

    Args:
        sizes: start -> the most bytes that a rank gives; infinity: it is sent alone.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    found: list[list[fx.Node]] = []
    open_bundles: dict[Any, tuple[list[fx.Node], float]] = {}
    for node, given in sizes.items():
        if given >= ALONE_BYTES:
            continue
        is_scatter, dtype = node.target is reduce_scatter, getattr(node.args[0][0].meta.get("val"), "dtype", None)  # type: ignore[index, union-attr]
        key = (node.kwargs["group"], "sizes" in node.kwargs, str(node.meta.get("section")), dtype)
        bundle, size = open_bundles.get(key, ([], 0.0))
        # A scatter is sent when its last gradient is there, so nothing of it may be read before; of a gather all is there from the start.
        is_read = is_scatter and any(_first_reader(each, position) < position[node] for each in bundle)
        is_full = size >= BUNDLE_BYTES if is_scatter else size + given > bytes_of_bundle(len(node.kwargs["group"]))  # type: ignore[arg-type]
        if bundle and not is_read and not is_full:
            bundle.append(node)
        else:
            bundle, size = [node], 0.0
            found.append(bundle)
        open_bundles[key] = bundle, size + given
    return [bundle for bundle in found if len(bundle) > 1]


def _bytes_in_message(start: fx.Node) -> float:
    """Return the bytes that the rank with the largest part of the group gives; infinity: what cannot share a message."""
    operands: Any = start.args[0]
    is_gather = start.target is all_gather
    if len(operands) > 1 or (is_gather and not is_held(operands[0])):
        return math.inf
    if not is_gather or "sizes" not in start.kwargs:
        return float(start.meta.get("bytes", 0))
    value, dim, sizes = operands[0].meta["val"], start.args[1][0], start.kwargs["sizes"][0]  # type: ignore[index]
    shape = list(value.shape)
    shape[dim] = max(sizes)  # type: ignore[index, arg-type]
    return float(math.prod(shape) * value.dtype.itemsize)


def is_held(node: Any) -> bool:
    """Return whether a value is a parameter or buffer of the rank, or a view or cast of one, or of what ranks exchange of theirs."""
    while isinstance(node, fx.Node) and _is_alone_read(node):
        (node,) = node.all_input_nodes
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _is_alone_read(node: fx.Node) -> bool:
    """Return whether a node reads one value, and its result is that value in another form, or what the group has of it."""
    is_exchange = node.target in (all_to_all, wait, operator.getitem)
    return (is_exchange or isinstance(node.target, OpOverload)) and len(node.all_input_nodes) == 1


def is_view(node: fx.Node) -> bool:
    """Return whether a node is a view of its only input."""
    return (
        isinstance(node.target, OpOverload)
        and len(node.all_input_nodes) == 1
        and views_its_arguments(node.target)
        and not written_arguments(node)
    )


def _first_reader(start: fx.Node, position: dict[fx.Node, int]) -> int:
    """Return the position of the first node that reads a collective's result, after its wait, items and views: it is sent before that."""
    to_visit = [start]
    reader_positions = []
    while to_visit:
        for user in to_visit.pop().users:
            if user.target in (wait, operator.getitem) or is_view(user):
                to_visit.append(user)
            else:
                reader_positions.append(position[user])
    return min(reader_positions, default=len(position))


def _merge(graph: fx.Graph, bundle: Sequence[fx.Node], *, at_first: bool) -> None:
    """Replace collectives by one, in place of the first (``at_first``) or the last of them; their results become its items."""
    first, place = bundle[0], bundle[0] if at_first else bundle[-1]
    if at_first:
        for node in bundle[1:]:
            _move_up(node.args[0][0], first)  # type: ignore[index]
    keywords = dict(first.kwargs)
    if "sizes" in keywords:
        keywords["sizes"] = tuple(sizes for node in bundle for sizes in node.kwargs["sizes"])  # type: ignore[union-attr]
    arguments = ([node.args[0][0] for node in bundle], tuple(node.args[1][0] for node in bundle))  # type: ignore[index]
    with graph.inserting_after(place):
        started = graph.create_node("call_function", first.target, arguments, keywords, name=f"{first.name}_bundle")
        started.meta = {**first.meta, "bytes": sum(int(node.meta.get("bytes", 0)) for node in bundle)}
    with graph.inserting_after(started):
        finished = graph.create_node("call_function", wait, (started,), {}, name=f"wait_{first.name}_bundle")
        finished.meta["section"] = first.meta.get("section")
    behind = finished
    for index, node in enumerate(bundle):
        (old,) = node.users
        for item in list(old.users):
            with graph.inserting_after(behind):
                new = graph.create_node("call_function", operator.getitem, (finished, index), {}, name=f"{item.name}_item")
            new.meta = dict(item.meta)
            behind = new
            item.replace_all_uses_with(new)
            graph.erase_node(item)
            behind = behind if at_first else _move_views_down(new)
        graph.erase_node(old)
        graph.erase_node(node)


def _move_views_down(item: fx.Node) -> fx.Node:
    """Move the views of an item of a message, and views of those, to after it; return the last of them."""
    last, to_visit = item, [item]
    while to_visit:
        for user in to_visit.pop().users:
            if is_view(user):
                last.append(user)
                last = user
                to_visit.append(user)
    return last


def _move_up(node: Any, before: fx.Node) -> None:
    """Move a held value, with the views and casts that lead to it, before a node if it comes after it."""
    chain = [node]
    while chain[-1].op != "get_attr":
        (source,) = chain[-1].all_input_nodes
        chain.append(source)
    order = {each: index for index, each in enumerate(before.graph.nodes)}
    for each in reversed(chain):
        if order[each] > order[before]:
            before.prepend(each)
