"""Start every collective as early and wait for it as late as the program allows, so that compute in between hides it.

    before                                  after

    dw2 = mm(...)                           dw2 = mm(...)
    dx = mm(...)                            pending = all_reduce([dw2])      as soon as dw2 is there
    dw1 = mm(...)                           dx = mm(...)
    pending = all_reduce([dw2])             dw1 = mm(...)
    sums = wait(pending)                    ...
    ...                                     sums = wait(pending)             before its first reader
    store(sums)                             store(sums)

At most two reductions of gradients of parameters are under way in a backward: what a third sends would be a third copy of gradients in
memory, since a message is held until it is waited for. So the program waits for the first when the third has started. For what it does not
read, such as a gradient that another rank of its group sends on, it waits when the next of these has started. A sum of what another
reduction yields, such as a gradient that is scattered inside a node and summed over nodes, starts when the program has waited for that one;
of these, too, two are under way. Reductions of values do not count: what reads their results waits for them.

Sums over all microbatches are sent from the memory in which they were added: the program waits for none of them before the end. They start
after the gradients that earlier stages wait for are sent. Views of such sums, and sums of them over other ranks, come at the end too.

Views of what arrives are taken where they are read, so that a program does not wait for a scattered gradient in order to view it. Views of
what is sent are taken at once: the gradient of a linear's input is on its way while that of its weight is computed.

Parameters are gathered one message ahead of their use, not all at the start, to keep few of them in memory whole. The same holds for
activations of which the forward saved only the rank's shard, and which the backward gathers again: in a weight half, the first of them from
its beginning. A backward starts none in its forward.
Parameters that all microbatches read are whole for the whole step in any case: their gathers start at once, so that a stage gathers while
it waits for earlier stages.

All ranks of a group must start collectives in one order. If early starts would order two ranks differently (their kernels may differ, for
a shard of one sample), all ranks keep the written order, which they share. A start never moves up past a call that writes in place, since
that might write the operand.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from passes.emit.coalesce_collectives import is_held, is_view
from passes.graph.dependencies import with_ancestors
from passes.graph.schemas import is_cast_or_view, views_its_arguments, written_arguments
from passes.ir.comm.functional import AGAIN, FOR_ALL
from passes.ir.comm.primitives import COLLECTIVES, COMMUNICATION, all_gather, all_reduce, reduce_scatter, wait
from passes.ir.schedule import Action, ActionKind
from passes.ir.torch_private import OpOverload

_REDUCTIONS = frozenset({all_reduce, reduce_scatter})

MOST_UNDER_WAY = 2
"""Reductions that a rank has started and not waited for."""


def overlap_communication(graphs: Sequence[fx.Graph]) -> None:
    """Reorder programs in place.

    Args:
        graphs: of ranks that start the same collectives, in the same written order.
    """
    written = [[node for node in graph.nodes if node.target in COLLECTIVES] for graph in graphs]
    orders = [_reordered(graph, _Order(graph, _next_gathers(graph))) for graph in graphs]
    started = [sorted(range(len(nodes)), key=lambda number: order[nodes[number]]) for order, nodes in zip(orders, written, strict=True)]
    if any(each != started[0] for each in started):  # ranks would start them in different orders, and deadlock
        orders = [_reordered(graph, _Order(graph, {}, early=False)) for graph in graphs]
    for graph, order in zip(graphs, orders, strict=True):
        output = graph.output_node()
        for node in order:
            output.prepend(node)
        graph.lint()


def _reordered(graph: fx.Graph, order: _Order) -> dict[fx.Node, int]:
    """Return each node's position in the new order."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    for node in nodes:
        if node not in order.late:
            order.place(node)
    for node in nodes:
        order.place(node)  # waits for results without a reader
    return {node: place for place, node in enumerate(order.placed)}


class _Order:
    """The new order, as far as it has been decided.

    Args:
        ahead: wait for a gather -> the gather that starts before it.
        early: start collectives as soon as their operands are computed; else where they are written.

    Attributes:
        late: nodes that move down to their first readers.
    """

    def __init__(self, graph: fx.Graph, ahead: Mapping[fx.Node, fx.Node], *, early: bool = True) -> None:
        self.placed: dict[fx.Node, None] = {}
        self.late = _late_nodes(graph)
        self._under_way: dict[bool, list[fx.Node]] = {False: [], True: []}
        self._unread: fx.Node | None = None
        self._ahead = ahead
        self._starts = _early_starts(graph, self.late) if early else {}
        self._awaited = _chained_starts(graph, self.late) if early else {}
        self._chained: dict[fx.Node, list[fx.Node]] = {}
        for start, awaited in self._awaited.items():
            for each in awaited:
                self._chained.setdefault(each, []).append(start)

    def place(self, node: fx.Node) -> None:
        """Append a node after its inputs, then the collectives that can start now that it is computed."""
        if node in self.placed:
            return
        for source in node.all_input_nodes:
            self.place(source)
        if node in self._ahead:
            self.place(self._ahead[node])
        self.placed[node] = None
        if node.target in COLLECTIVES and not _is_read(node):
            self._place_readers(self._unread)
            self._unread = node
        elif node.target in _REDUCTIONS and not node.meta.get(FOR_ALL) and not _is_computed_with(node):
            self._wait_for_earlier(node)
        for start in self._starts.get(node, ()):
            self.place(start)
        for start in self._chained.get(node, ()):
            if all(each in self.placed for each in self._awaited[start]):
                self.place(start)

    def _place_readers(self, value: fx.Node | None) -> None:
        """Place the wait for what nothing reads, with its items and views, which then hold it no longer."""
        for user in value.users if value is not None else ():
            self.place(user)
            self._place_readers(user)

    def _wait_for_earlier(self, started: fx.Node) -> None:
        """Place the waits of all reductions but the last ones, ``MOST_UNDER_WAY``; those that read other reductions are counted apart."""
        kind = started in self._awaited
        self._under_way[kind] = [node for node in (*self._under_way[kind], started) if any(user not in self.placed for user in node.users)]
        while len(self._under_way[kind]) > MOST_UNDER_WAY:
            for user in self._under_way[kind].pop(0).users:
                self.place(user)


def _is_read(value: fx.Node) -> bool:
    """Return whether anything but waits, items and views reads what a collective yields."""
    return any(_is_read(user) if user.target in (wait, operator.getitem) or is_view(user) else True for user in value.users)


def _is_computed_with(value: fx.Node) -> bool:
    """Return whether a program computes with what a reduction yields, or sends it: it is no gradient of a parameter."""
    for user in value.users:
        if user.target is wait or user.target is operator.getitem or (user.op == "call_function" and is_cast_or_view(user)):
            if _is_computed_with(user):
                return True
        elif isinstance(user.target, OpOverload) or (user.target in COMMUNICATION and user.target not in _REDUCTIONS):
            return True
    return False


def _late_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the waits for collectives, items and views of their results, and values computed from these once for all microbatches."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        is_part = source in late and (node.target is operator.getitem or is_view(node))
        is_result = (node.target is wait and source.target in COLLECTIVES) or is_part
        if is_result or (node.meta.get(FOR_ALL) and all(each in late for each in node.all_input_nodes)):
            late.add(node)
    return late


def _is_gather(node: fx.Node) -> bool:
    """Return whether a node gathers parameters or saved shards: started as soon as possible, all would be in memory whole at once."""
    if node.target is not all_gather or node.meta.get(FOR_ALL):
        return False
    return _gathers_saved(node) or all(is_held(part) for part in node.all_input_nodes)


def _gathers_saved(node: fx.Node) -> bool:
    """Return whether a backward gathers a shard that its forward saved: a repeated gather whose operand is of another section."""
    if not node.meta.get(AGAIN) or all(is_held(part) for part in node.all_input_nodes):
        return False
    source = node.args[0][0]  # type: ignore[index]
    while isinstance(source, fx.Node) and (source.target is operator.getitem or is_cast_or_view(source)):  # done again, too
        source = source.args[0]
    return isinstance(source, fx.Node) and source.meta.get("section") != node.meta.get("section")


def _is_saved(operand: fx.Node, start: fx.Node) -> bool:
    """Return whether a backward sends a value of its forward, or a weight half one of its input half.

    Sent earlier, a received value would stay in memory until then. A backward alone is given what was saved for it.
    """
    made, sent = (node.meta.get("section") for node in (operand, start))
    if not isinstance(sent, Action) or sent.kind is ActionKind.FORWARD:
        return False
    return operand.op == "placeholder" or (isinstance(made, Action) and made.kind is not sent.kind)


def _next_gathers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map the wait of each gather of ``_is_gather`` to the next gather, which then runs while the result of this one is used.

    Gathers follow each other as the program waits for them. A backward starts the first of its own, in its own section. Over two mesh
    dimensions there are two gathers, and the second reads the first: it cannot start before it.
    """
    gathers = [node for node in graph.nodes if _is_gather(node)]
    if not gathers:
        return {}
    place = _reordered(graph, _Order(graph, {}))
    gathers.sort(key=lambda node: min((place[user] for user in node.users), default=0))
    of_parameters, of_saved = ([node for node in gathers if _gathers_saved(node) is is_saved] for is_saved in (False, True))
    following_of = {
        next(iter(node.users)): following
        for node, following in (*itertools.pairwise(of_parameters), *itertools.pairwise(of_saved))
        if node.users and not _reads(following, node)
        if not following.meta.get(AGAIN) or node.meta.get("section") == following.meta.get("section")
    }
    return _first_of_weight_halves(graph, of_saved) | following_of


def _first_of_weight_halves(graph: fx.Graph, gathers: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Map the first node of each weight half to the first of these gathers in it, which runs from its beginning.

    Most products of a weight half read what is gathered; a whole backward may come to its first one late.
    """
    first: dict[Any, fx.Node] = {}
    for gather in gathers:
        section = gather.meta.get("section")
        if isinstance(section, Action) and section.kind is ActionKind.BACKWARD_WEIGHT:
            first.setdefault(section, gather)
    needed = {section: with_ancestors([gather], lambda node: node.all_input_nodes) for section, gather in first.items()}
    beginning: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        section = node.meta.get("section")
        if section in first and node not in needed[section]:
            beginning.setdefault(section, node)
    return {node: first[section] for section, node in beginning.items()}


def _reads(gather: fx.Node, other: fx.Node) -> bool:
    """Return whether a gather reads the result of another one, directly or through other gathers and calls with one input."""
    return other in with_ancestors(
        [gather], lambda node: node.all_input_nodes if node.target is all_gather or len(node.all_input_nodes) == 1 else ()
    )


def _early_starts(graph: fx.Graph, late: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to the collectives that can start right after it: it is the last of their operands and of the in-place writes."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    starts: dict[fx.Node, list[fx.Node]] = {}
    barrier: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "call_function" and written_arguments(node):
            barrier = node
        is_for_all = node.target in _REDUCTIONS and node.meta.get(FOR_ALL)  # written after the gradients that are sent
        if node.target not in COLLECTIVES or any(source in late for source in node.all_input_nodes) or _is_gather(node) or is_for_all:
            continue
        candidates = [
            *(source for each in node.all_input_nodes for source in _without_views(each)),
            *([barrier] if barrier is not None else []),
        ]
        if candidates:
            last = max(candidates, key=position.__getitem__)
            if not _is_saved(last, node):
                starts.setdefault(last, []).append(node)
    return starts


def _without_views(value: fx.Node) -> list[fx.Node]:
    """Return the nodes after which a value is there, if its views, also by sizes, move up with their reader."""
    sources = [value]
    while isinstance(sources[0].target, OpOverload) and views_its_arguments(sources[0].target) and not written_arguments(sources[0]):
        base, *sizes = sources[0].all_input_nodes
        sources = [base, *sizes, *sources[1:]]
    return sources


def _wait_of(result: fx.Node) -> fx.Node | None:
    """Return the wait of which a value is an item, or a view of one; None if it is computed from it."""
    while result.target is not wait and (result.target is operator.getitem or is_view(result)):
        (result,) = result.all_input_nodes
    return result if result.target is wait else None


def _chained_starts(graph: fx.Graph, late: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map each reduction whose inputs are results of reductions to the nodes after which it can start.

    These are the waits for the inputs, and the last in-place write before it.
    """
    starts: dict[fx.Node, list[fx.Node]] = {}
    barrier: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "call_function" and written_arguments(node):
            barrier = node
        if node.target not in _REDUCTIONS or node.meta.get(FOR_ALL) or not all(source in late for source in node.all_input_nodes):
            continue
        waits = [_wait_of(source) for source in node.all_input_nodes]
        reductions = [each for each in waits if each is not None and each.all_input_nodes[0].target in _REDUCTIONS]
        if len(reductions) == len(waits):
            starts[node] = [*dict.fromkeys(reductions), *([barrier] if barrier is not None else [])]
    return starts
