"""Emit the calls of a mixture of experts where the experts are stored: rows go to the rank of their expert, and come back.

Before (whole shapes), experts and rows over two ranks:       After, on each rank:

    up = grouped_mm(x, w_up, group)                               order, places, sent = route_rows(group, [2, 2])
    act = silu(up)                                                received = exchange(sent)
    y = grouped_mm(act, w_down, group)                            sources = received_rows(received)
    z = mul(y, weights)                                           x_routed = exchange_rows(index_select(x, 0, order), ...)
                                                                  group_routed = exchange_rows(index_select(group, 0, order), ...)
                                                                  up = grouped_mm(x_routed, w_up, local_index(group_routed))
                                                                  act = silu(up)
                                                                  y_routed = grouped_mm(act, w_down, local_index(group_routed))
                                                                  y = index_select(exchange_rows(y_routed, ..., back=True), 0, places)
                                                                  z = mul(y, weights)

So no rank computes rows of experts that it does not store, each row goes once in each direction, and how many go where is known when the
program runs. The backward of an exchange is the one back. Gradients of the experts are whole on the rank that stores them: no rank sums
them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes
from passes.analysis.routed_rows import GROUP, Route, has_rows_of
from passes.graph.symbolic_sizes import traced_size
from passes.ir.comm import functional as collectives
from passes.ir.comm.expert_rows import received_rows, route_rows
from passes.ir.layout import Layout, Shard
from passes.rules.loops import Size
from passes.spmd.local_shapes import Extents
from passes.spmd.reshard import Resharder

aten = torch.ops.aten

ROUTE = "route"
"""The key in ``meta["custom"]`` that marks what sends rows to the ranks of their experts, or back, for reports."""


class RoutedLayouts(Protocol):
    """Protocol of the used part of ``passes.spmd.propagate.layouts.Layouts``."""

    @property
    def routes(self) -> Mapping[str, Route]:
        """Call -> how its rows get to the ranks that store their experts."""

    @property
    def needs(self) -> Mapping[str, tuple[Layout, ...]]:
        """Call -> the layout in which it reads each tensor."""

    @property
    def results(self) -> Mapping[str, tuple[Layout, ...]]:
        """Node -> the layout of each tensor that it gives."""


@dataclass(frozen=True)
class _Path:
    """How the rows of one mixture go: nodes of the rank's graph.

    Attributes:
        order, places: of the rows that the rank has.
        sent, received: how many go to each rank, and come from each.
        sources: one element for each row that comes.
    """

    order: fx.Node
    places: fx.Node
    sent: fx.Node
    received: fx.Node
    sources: fx.Node


class RouteWriter:
    """Emits rows at the ranks of their experts, and these rows back.

    Args:
        axes, layouts: those of the whole graph.
        extents: the sizes of the rank's shards.
        emit: ``(function, args, kwargs, name, like)`` emits a call.
        resharder: for the values that this rank computes of routed rows.
        own_part: ``(value, need, reader)`` returns this rank's part of a value, of its own rows.
    """

    def __init__(
        self,
        axes: Axes,
        layouts: RoutedLayouts,
        extents: Extents,
        emit: Callable[..., fx.Node],
        resharder: Resharder,
        own_part: Callable[[fx.Node, Layout, fx.Node], fx.Node],
    ) -> None:
        self._axes, self._layouts, self._extents, self._emit = axes, layouts, extents, emit
        self._resharder, self._own_part = resharder, own_part
        self._computed: dict[fx.Node, fx.Node] = {}
        self._sent: dict[tuple[fx.Node, Route, Layout], fx.Node] = {}
        self._numbers: dict[tuple[Route, int], fx.Node] = {}
        self._paths: dict[Route, _Path] = {}
        self._sizes: dict[Size, fx.Node] = {}

    def is_routed(self, node: fx.Node) -> bool:
        """Return whether a call is computed where experts are stored."""
        return node.name in self._layouts.routes

    def reads_rows(self, node: fx.Node, operand: fx.Node) -> bool:
        """Return whether a routed call reads rows of the mixture in an operand."""
        return has_rows_of(self._axes, operand.name, self._layouts.routes[node.name].group)

    def register(self, node: fx.Node, copy: fx.Node) -> None:
        """Remember what a routed call gives."""
        self._computed[node] = copy
        if isinstance(copy.meta["val"], Tensor):
            self._resharder.register(node, 0, copy, self._layouts.results[node.name][0], self._axes.of(node.name))

    def is_read_elsewhere(self, node: fx.Node) -> bool:
        """Return whether a reader of a routed value computes with the rank's own rows, or with those that it gets for another stage."""
        route = self._layouts.routes[node.name]
        return any(self._layouts.routes.get(user.name) != route for user in node.users)

    def part(self, node: fx.Node, operand: fx.Node, need: Layout) -> fx.Node:
        """Return the rows of an operand that this rank has the experts of."""
        route = self._layouts.routes[node.name]
        if operand in self._computed and self._layouts.routes[operand.name] == route:
            return self._resharder.read(operand, need, node)
        key = operand, route, need
        if key not in self._sent:
            path = self._path(route, node)
            own = self._own_part(operand, need, node)
            ordered = self._emit(aten.index_select.default, (own, 0, path.order), {}, f"{operand.name}_by_rank", node)
            self._sent[key] = self._exchange(ordered, path, route, f"{operand.name}_routed_{self._over(route)}", node, back=False)
        return self._sent[key]

    def own_rows(self, value: fx.Node) -> fx.Node:
        """Emit the rows of a routed value that the rank itself has, in their order."""
        route, copy = self._layouts.routes[value.name], self._computed[value]
        path = self._paths[route]
        back = self._exchange(copy, path, route, f"{value.name}_returned_{self._over(route)}", value, back=True)
        return self._emit(aten.index_select.default, (back, 0, path.places), {}, f"{value.name}_own", value)

    def local_group(self, node: fx.Node, group: fx.Node, need: Layout) -> fx.Node:
        """Return the expert of each row that this rank computes, counted from the first that it stores."""
        route = self._layouts.routes[node.name]
        key = route, route.experts[node.name]
        if key not in self._numbers:
            parts = self._experts(route, route.experts[node.name])
            place = self._extents.coordinate[route.dimension]
            sizes: tuple[Any, Any] = ([], 0) if len(set(parts)) == 1 else (list(parts), parts[place])
            over, count = self._extents.mesh[route.dimension]
            arguments = (self.part(node, group, need), over, count, parts[place], *sizes)
            self._numbers[key] = self._emit(collectives.local_index, arguments, {}, f"{route.group}_local", node)
        return self._numbers[key]

    def row_count(self, node: fx.Node) -> Size:
        """Return the number of rows of a routed call whose operands are emitted."""
        (rows,) = self._paths[self._layouts.routes[node.name]].sources.meta["val"].shape
        return traced_size(rows)

    def size_node(self, rows: Size) -> fx.Node:
        """Emit a number of received rows."""
        if rows not in self._sizes:
            sources = next(path.sources for path in self._paths.values() if traced_size(path.sources.meta["val"].shape[0]) == rows)
            self._sizes[rows] = self._emit(aten.sym_size.int, (sources, 0), {}, f"{sources.name}_count", sources)
        return self._sizes[rows]

    def _over(self, route: Route) -> str:
        return self._extents.mesh[route.dimension][0]

    def _experts(self, route: Route, axis: int) -> Sequence[int]:
        """Return how many experts each rank stores."""
        layout = [Shard(axis, 0) if index == route.dimension else None for index in range(len(self._extents.mesh))]
        return [int(part) for part in self._extents.parts(axis, route.dimension, layout)]

    def _path(self, route: Route, node: fx.Node) -> _Path:
        """Return how the rows of a mixture go, written before the first of its calls."""
        if route not in self._paths:
            name, over, count = route.group, *self._extents.mesh[route.dimension]
            product, axis = next(iter(route.experts.items()))
            group, need = self._axes.operands[product][GROUP], self._layouts.needs[product][GROUP]

            def emit(function: Any, arguments: tuple[Any, ...], label: str) -> fx.Node:
                return self._emit(function, arguments, {}, f"{name}_{label}", node)

            both = emit(route_rows, (self._own_part(group, need, node), self._experts(route, axis)), "route")
            order, places, sent = (emit(operator.getitem, (both, place), word) for place, word in enumerate(("order", "places", "sent")))
            received = _marked(emit(collectives.exchange, (sent, 0, 0, over, count, [], 0, [], 0), "received"))
            sources = emit(received_rows, (received, order), "sources")
            self._paths[route] = _Path(order, places, sent, received, sources)
        return self._paths[route]

    def _exchange(self, rows: fx.Node, path: _Path, route: Route, name: str, like: fx.Node, *, back: bool) -> fx.Node:
        arguments = (rows, path.sent, path.received, path.order, path.sources, self._over(route), back)
        return _marked(self._emit(collectives.exchange_rows, arguments, {}, name, like))


def _marked(node: fx.Node) -> fx.Node:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), ROUTE: True}
    return node
