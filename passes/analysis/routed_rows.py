"""Find calls that can be computed where experts are stored: products of a mixture without a capacity, and calls between them.

    up = grouped_mm(tokens, w_up, group)          the rows of a rank's experts, of the tokens of all ranks
    bias = index(b_up, [group])                   reads nothing but the experts of these rows
    gated = mul(silu(add(up, bias)), ...)         row by row, on the way to another product: the same rows
    down = grouped_mm(gated, w_down, group)
    y = mul(down, weights)                        no product after it: the rank's own tokens again

A call computes row by row if each of its operands and results has the rows of the mixture as its first dimension, or does not have them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
from torch import Tensor, fx

from passes.analysis.axes import Axes, is_item
from passes.graph.aliasing import mutated_arguments
from passes.graph.dependencies import with_ancestors
from passes.graph.schemas import bound_arguments, draws, tensor_operands
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import ModelGraph
from passes.rules.loops import LocalCall, Loops, Size
from passes.rules.ops.grouped_mm import grouped_mm

MATRICES = 1
"""The place of the experts' matrices among the tensors of a ``grouped_mm``."""

GROUP = 2
"""The place of the expert of each row among them."""


@dataclass(frozen=True)
class Route:
    """How rows go to the ranks that store their experts, and back.

    Attributes:
        dimension: the index of their mesh dimension.
        group: the value that says the expert of each row.
        stage: the stage that computes these calls: rows are back where a stage ends.
        experts: call -> the axis of its experts.
    """

    dimension: int
    group: str
    stage: int
    experts: Mapping[str, int] = field(compare=False)


def find_routes(
    graph: ModelGraph,
    axes: Axes,
    mesh: Sequence[tuple[str, int]],
    rows: Collection[str],
    assigned: Sequence[Collection[int]],
    stages: Mapping[str, int] | None = None,
) -> Mapping[str, Route]:
    """Return the calls that are computed where experts are stored, and items: of mixtures whose rows and experts one dimension cuts.

    Args:
        mesh: its dimensions that cut axes.
        rows: the names of those that cut the batch.
        assigned: for each dimension of the mesh, the axes that it cuts.
        stages: call -> its stage; None: there is one.
    """
    candidates = [index for index, (name, _) in enumerate(mesh) if name in rows and len(assigned[index]) > 1]
    if not candidates:
        return {}
    routes: dict[str, Route] = {}
    for group, stage, products, calls in _mixtures(graph, axes, stages):
        experts = {product.name: axes.of(axes.operands[product.name][MATRICES].name)[0] for product in products}
        fitting = (index for index in candidates if _cuts_both(graph, axes, group, experts.values(), assigned, index, mesh[index][1]))
        dimension = next(fitting, None)
        if dimension is not None:
            route = Route(dimension, group.name, stage, {name: axis for name, (axis,) in experts.items()})
            routes.update(dict.fromkeys((call.name for call in calls), route))
    return routes


def _cuts_both(
    graph: ModelGraph,
    axes: Axes,
    group: fx.Node,
    experts: Collection[tuple[int, ...]],
    assigned: Sequence[Collection[int]],
    index: int,
    n_ranks: int,
) -> bool:
    """Return whether a mesh dimension cuts the rows of a mixture and, by itself, its experts, of which each rank stores some.

    Args:
        experts: for each product, the axes of the first dimension of its matrices.
    """
    found = {axis for dimension in experts for axis in dimension}
    cut_elsewhere = {axis for other, of_other in enumerate(assigned) if other != index for axis in of_other}
    if axes.of(group.name)[0][0] not in assigned[index] or not found <= set(assigned[index]) - cut_elsewhere:
        return False
    stored = {axis for name in graph.parameters if name in axes.tensors for dimension in axes.of(name)[:1] for axis in dimension}
    sizes = {axes.sizes[axis] for axis in found}
    are_alike = len(sizes) == 1 and all(len(dimension) == 1 for dimension in experts)
    return found <= stored and are_alike and all(isinstance(size, int) and size >= n_ranks for size in sizes)


def _mixtures(
    graph: ModelGraph, axes: Axes, stages: Mapping[str, int] | None
) -> Iterator[tuple[fx.Node, int, list[fx.Node], set[fx.Node]]]:
    """Yield of each mixture the expert of its rows, its products of one stage, and all that can be computed where experts are stored."""
    by_group: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    for node in graph.graph.find_nodes(op="call_function", target=grouped_mm):
        group = bound_arguments(node)["group"]
        rows = axes.of(group.name)[0]
        if node.name in axes.loops and rows and len(set(rows)) == len(rows):
            by_group.setdefault((group, 0 if stages is None else stages[node.name]), []).append(node)
    for (group, stage), products in by_group.items():
        nodes = [node for node in graph.computing_nodes() if stages is None or stages.get(node.name) == stage]
        reached = _reached(nodes, axes, group, frozenset(products))
        calls = with_ancestors(products, functools.partial(_sources_among, reached))
        yield group, stage, products, calls | {user for call in calls for user in call.users if is_item(user)}


def _sources_among(nodes: Collection[fx.Node], node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source in nodes]


def has_rows_of(axes: Axes, value: str, group: str) -> bool:
    """Return whether the first dimension of a value holds the rows of a mixture, whose experts ``group`` says."""
    return axes.of(value)[:1] == axes.of(group)[:1]


def _reached(nodes: Iterable[fx.Node], axes: Axes, group: fx.Node, products: frozenset[fx.Node]) -> set[fx.Node]:
    """Return, of nodes, what is computed row by row of products and the experts of their rows, and the products."""
    reached: set[fx.Node] = set()
    for node in nodes:
        sources = [source for source in node.all_input_nodes if source in reached or source is group]
        if node in products or (sources and _is_row_by_row(node, axes, group.name)):
            reached.add(node)
    return reached


def _is_row_by_row(node: fx.Node, axes: Axes, group: str) -> bool:
    if is_item(node):
        return isinstance(node.meta.get("val"), Tensor) and has_rows_of(axes, node.name, group)
    loops = axes.loops.get(node.name)
    if loops is None or loops.windows or draws(node) or mutated_arguments(node):
        return False
    first = _loop_over_rows(node, axes, loops, axes.of(group)[0])
    return first is not None and loops.factors[first].reduction is None and not _sizes_depend_on_rows(node, loops, first)


def _loop_over_rows(node: fx.Node, axes: Axes, loops: Loops, rows: tuple[int, ...]) -> int | None:
    """Return the loop of a call that runs over rows alone, in the first dimension of all that has any, and of each result; None: none."""
    operands = [axes.of(operand.name) for operand in axes.operands[node.name]]
    found: set[tuple[int, ...]] = set()
    for tensor, dimensions in zip((*operands, *axes.tensors[node.name]), (*loops.operands, *loops.results), strict=True):
        has_rows = tensor[:1] == (rows,)
        found.update(dimensions[:1] if has_rows else ())
        if any(not set(rows).isdisjoint(dimension) for dimension in (tensor[1:] if has_rows else tensor)):
            return None
    if not all(result[:1] == (rows,) for result in axes.tensors[node.name]) or len(found) != 1:
        return None
    (factors,) = found
    return factors[0] if len(factors) == 1 else None


def _sizes_depend_on_rows(node: fx.Node, loops: Loops, rows: int) -> bool:
    """Return whether a call has sizes among its arguments that depend on how many rows it has."""
    if loops.localize is None:
        return False

    def local(number: Size | None) -> Mapping[str, object]:
        def shape(tensor: Tensor, dimensions: tuple[tuple[int, ...], ...]) -> tuple[Size, ...]:
            sizes = [size_of(size) for size in tensor.shape]
            return tuple(number if number is not None and each == (rows,) else size for size, each in zip(sizes, dimensions, strict=True))

        value = node.meta["val"]
        results = [value] if isinstance(value, Tensor) else value
        factors = [factor.size for factor in loops.factors]
        factors[rows] = factors[rows] if number is None else number
        call = LocalCall(
            arguments=bound_arguments(node),
            operands=tuple(map(shape, (each.meta["val"] for each in tensor_operands(node)), loops.operands)),
            results=tuple(map(shape, results, loops.results)),
            factors=tuple(factors),
        )
        assert loops.localize is not None
        return loops.localize(call)

    return local(None) != local(sympy.Symbol("rows", integer=True, positive=True))
