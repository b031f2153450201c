"""Readable names of axes: what a person calls them, from the operations in which they run.

    batch       the rows of the inputs
    heads       attention heads (of keys and values, with grouped queries)
    head        the inside of one head
    sequence    what attention compares
    vocab       rows of an embedding, classes of a cross-entropy
    ffn         made by one weight, contracted by another
    hidden      what normalisations run over, what embeddings give: the residual stream
    experts     sets of weights, each for its own tokens
    channels, groups, height, width, depth, length

Axes of the same name (the ffn of every block) are numbered in the order of the graph: ``ffn[3]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from passes.analysis.axes import Axes
from passes.graph.dependencies import parameter_values
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.layout import BATCH, SPACE

__all__ = ["axes_named", "axis_names", "batch_axes", "beside_rows", "expert_axes", "shortened", "space_axes"]

_BY_ROLE = (
    *((role, role) for role in SPACE),
    ("vocab", "vocab"),
    ("classes", "vocab"),
    ("heads", "heads"),
    ("qk", "head"),
    ("head", "head"),
    ("queries", "sequence"),
    ("keys", "sequence"),
    ("experts", "experts"),
    ("features", "hidden"),
    ("channels", "channels"),
    ("channels_out", "channels"),
    ("channels_in", "channels"),
    ("groups", "groups"),
    ("length", "length"),
)
"""A role that decides, and the name; the first that an axis plays."""

_MADE, _CONTRACTED = {"out", "columns"}, {"in"}

_APART = {"batch1", "batch2", "batch3"}
"""What products of activations do for each entry apart: heads, in an attention that is written out."""


def batch_axes(graph: ModelGraph, axes: Axes) -> frozenset[int]:
    """The axes that hold the batch in the inputs."""
    return frozenset(
        axes.of(leaf.placeholder)[leaf.batch_dim][0]
        for leaf in graph.inputs
        if leaf.placeholder is not None and leaf.batch_dim is not None and axes.of(leaf.placeholder)[leaf.batch_dim]
    )


def axis_names(graph: ModelGraph, axes: Axes) -> tuple[str, ...]:
    """The name of every axis, with its number."""
    batch = batch_axes(graph, axes)
    of_parameters = {axis for name in graph.parameters if name in axes.tensors for each in axes.of(name) for axis in each}
    experts, of_products = expert_axes(graph, axes), _axes_of_products(graph, axes, batch)
    counts: Counter[str] = Counter()
    names = []
    for axis, roles in enumerate(axes.roles):
        is_special = axis in batch or axis in experts
        name = (BATCH if axis in batch else "experts") if is_special else _name(roles, axis in of_parameters, axis in of_products)
        names.append(f"{name}[{counts[name]}]")
        counts[name] += 1
    return tuple(names)


def beside_rows(graph: ModelGraph, axes: Axes, assigned: Collection[int]) -> frozenset[int]:
    """Of the axes that a mesh dimension of rows cuts, those for which rows are gathered; to experts they are sent."""
    others = set(assigned) - batch_axes(graph, axes) if assigned else set[int]()
    return frozenset(others - expert_axes(graph, axes)) if others else frozenset()


def expert_axes(graph: ModelGraph, axes: Axes) -> frozenset[int]:
    """The axes along which a weight has a matrix for each element, multiplied with what that element has of the activations.

    Not the groups of a convolution, and not heads, which attention names.
    """
    found: set[int] = set()
    for name, loops in axes.loops.items():
        operands = axes.operands[name]
        places = [place for place, operand in enumerate(operands) if operand.name in graph.parameters]
        if len(operands) - len(places) != 1 or not any(factor.reduction == "sum" for factor in loops.factors):
            continue
        (activation,) = (place for place in range(len(operands)) if place not in places)
        for factor in range(len(loops.factors)):
            everywhere = (*(loops.operands[place] for place in (activation, *places)), *loops.results)
            if places and all(any(factor in dimension for dimension in tensor) for tensor in everywhere):
                found.update(axes.factors[name][factor])
    return frozenset(axis for axis in found if not axes.roles[axis].keys() & {"groups", "heads"})


def _axes_of_products(graph: ModelGraph, axes: Axes, batch: frozenset[int]) -> frozenset[int]:
    """Find the axes that products of two activations, made for each row of the batch apart, contract or give as columns.

    Scores of an attention that is decomposed contract the width of a head, and their products with values give it. Whether an attention
    is decomposed depends on its dropout, that is on training: names must not. Columns that are normalised elsewhere are the width of the
    model: a product with zeros and ones that sends tokens to experts gives them.
    """
    weights = parameter_values(graph)
    found: set[int] = set()
    for name, loops in axes.loops.items():
        operands = axes.operands[name]
        if len(operands) != 2 or any(operand.name in weights for operand in operands):
            continue
        left, right = ({factor for dimension in operand for factor in dimension} for operand in loops.operands)
        given = {factor for result in loops.results for dimension in result for factor in dimension}
        if any(batch.intersection(axes.factors[name][factor]) for factor in left & right & given):
            found.update(axis for factor in (left & right) - given for axis in axes.factors[name][factor])
            columns = (axis for factor in (right & given) - left for axis in axes.factors[name][factor])
            found.update(axis for axis in columns if "features" not in axes.roles[axis])
    return frozenset(found)


def _name(roles: Mapping[str, int], is_of_parameter: bool, is_of_product: bool) -> str:
    if {"rows", "columns"} <= roles.keys():  # compared with itself, in an attention that is written out
        return "sequence"
    if is_of_parameter and _MADE & roles.keys() and _CONTRACTED & roles.keys() and _APART & roles.keys():
        return "heads"
    if is_of_parameter and is_of_product and _CONTRACTED & roles.keys():
        return "head"
    for role, name in _BY_ROLE:
        if role in roles and (name not in ("vocab", "channels") or is_of_parameter):
            return name
    if is_of_parameter and "embedding" in roles:
        return "hidden"
    if is_of_parameter and _MADE & roles.keys() and _CONTRACTED & roles.keys():
        return "ffn"
    return "features" if is_of_parameter else "rest"


def space_axes(axes: Axes) -> dict[str, tuple[int, ...]]:
    """The axes along each dimension of space, by its name, outermost dimension first; of an image that is cut into blocks, the blocks.

    Sound has one dimension, its length.
    """
    inner = {axis for tensors in axes.tensors.values() for tensor in tensors for each in tensor for axis in each[1:]}
    found = {
        role: tuple(axis for axis, roles in enumerate(axes.roles) if role in roles and not (axis in inner and _is_inside(axes, axis, role)))
        for role in (*SPACE, "length")
    }
    present = {role: each for role, each in found.items() if each}
    return {role: each for role, each in present.items() if role in SPACE or len(present) == 1}


def _is_inside(axes: Axes, axis: int, role: str) -> bool:
    """Whether an axis stands behind another of its role in one dimension."""
    return any(
        role in axes.roles[other]
        for tensors in axes.tensors.values()
        for tensor in tensors
        for each in tensor
        if axis in each
        for other in each[: each.index(axis)]
    )


def axes_named(wanted: str, names: Sequence[str]) -> tuple[int, ...]:
    """The axes of a name: ``"ffn"`` is all of them, ``"ffn[3]"`` one.

    Raises:
        ConfigError: there is none.
    """
    found = tuple(axis for axis, name in enumerate(names) if wanted in (name, name.partition("[")[0]))
    if not found:
        known = ", ".join(sorted({name.partition("[")[0] for name in names} - {"rest"}))
        raise ConfigError(f"the model has no axis {wanted!r}", remedy=f"it has {known}")
    return found


def shortened(chosen: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    """How a plan says a choice of axes: a name alone where it means all of them."""
    short: list[str] = []
    for axis in chosen:
        base = names[axis].partition("[")[0]
        name = base if set(axes_named(base, names)) <= set(chosen) else names[axis]
        if name not in short:
            short.append(name)
    return tuple(short)
