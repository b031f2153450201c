"""Name axes as a person would, by the operations that loop over them.

    batch       the rows of the inputs
    heads       attention heads; with grouped queries, the heads of keys and values, and the queries of each
    head        the inside of one head
    sequence    queries and keys of attention
    vocab       rows of an embedding, classes of a cross-entropy
    ffn         output of one weight, contracted by another
    hidden      features of normalisations and embeddings: the residual stream
    experts     sets of weights, each for its own tokens
    channels, groups, height, width, depth, length

Axes of the same name (the ffn of every block) are numbered in the order of the graph: ``ffn[3]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from passes.analysis.axes import Axes
from passes.graph.dependencies import parameter_values
from passes.ir.errors import ConfigError, did_you_mean
from passes.ir.graph import ModelGraph
from passes.ir.layout import BATCH, SPACE

_BY_ROLE = (
    *((role, role) for role in SPACE),
    ("vocab", "vocab"),
    ("classes", "vocab"),
    ("heads", "heads"),
    ("group", "heads"),
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
"""(role, name): an axis gets the name of the first of these roles that it has."""

_PRODUCED, _CONTRACTED = {"out", "columns"}, {"in"}

_BATCHED = {"batch1", "batch2", "batch3"}
"""Roles of the batch dimensions of a batched product: heads, in a decomposed attention."""


def batch_axes(graph: ModelGraph, axes: Axes) -> frozenset[int]:
    """Return the axes that hold the batch in the inputs."""
    batched = ((leaf.placeholder, leaf.batch_dim) for leaf in graph.inputs)
    dimensions = [axes.of(name)[dim] for name, dim in batched if name is not None and dim is not None]
    return frozenset(dimension[0] for dimension in dimensions if dimension)


def axis_names(graph: ModelGraph, axes: Axes) -> tuple[str, ...]:
    """Return the name of every axis with its number among those of this name, such as ``ffn[3]``."""
    batch = batch_axes(graph, axes)
    of_parameters = {axis for name in graph.parameters if name in axes.tensors for each in axes.of(name) for axis in each}
    experts, of_products = expert_axes(graph, axes), _axes_of_products(graph, axes, batch)
    counts: Counter[str] = Counter()
    names = []
    for axis, roles in enumerate(axes.roles):
        if axis in batch:
            name = BATCH
        elif axis in experts:
            name = "experts"
        else:
            name = _name(roles, axis in of_parameters, axis in of_products)
        names.append(f"{name}[{counts[name]}]")
        counts[name] += 1
    return tuple(names)


def beside_rows(graph: ModelGraph, axes: Axes, assigned: Collection[int]) -> frozenset[int]:
    """Return, of the axes assigned to a mesh dimension of the batch, those that need rows gathered: all but the batch and experts."""
    others = set(assigned) - batch_axes(graph, axes) if assigned else set[int]()
    return frozenset(others - expert_axes(graph, axes)) if others else frozenset()


def expert_axes(graph: ModelGraph, axes: Axes) -> frozenset[int]:
    """Return the batch axes of products of one activation with weights: activation, weights and result all have them.

    Groups of a convolution and heads are left out.
    """
    batched: set[int] = set()
    for name, loops in axes.loops.items():
        n_weights = sum(operand.name in graph.parameters for operand in axes.operands[name])
        is_product = any(factor.reduction == "sum" for factor in loops.factors)
        if n_weights == 0 or len(axes.operands[name]) - n_weights != 1 or not is_product:
            continue
        for factor in range(len(loops.factors)):
            if all(any(factor in dimension for dimension in tensor) for tensor in (*loops.operands, *loops.results)):
                batched.update(axes.factors[name][factor])
    return frozenset(axis for axis in batched if not axes.roles[axis].keys() & {"groups", "heads"})


def head_axes(graph: ModelGraph, axes: Axes) -> frozenset[int]:
    """Return the axes of the heads of attention."""
    return frozenset(axis for axis, name in enumerate(axis_names(graph, axes)) if name.startswith("heads["))


def _axes_of_products(graph: ModelGraph, axes: Axes, batch: frozenset[int]) -> frozenset[int]:
    """Return the axes that batched products of two activations contract, or have as columns of the result.

    In a decomposed attention these are the width of a head: scores contract it, and the products of scores with values have it as columns.
    So names do not depend on whether an attention is decomposed, which depends on training. Columns that are normalised elsewhere are
    left out: they are the width of the model, in a product that sends tokens to experts.
    """
    weights = parameter_values(graph)
    of_products: set[int] = set()
    for name, loops in axes.loops.items():
        operands = axes.operands[name]
        if len(operands) != 2 or any(operand.name in weights for operand in operands):
            continue
        left, right = ({factor for dimension in operand for factor in dimension} for operand in loops.operands)
        results = {factor for result in loops.results for dimension in result for factor in dimension}
        if any(batch.intersection(axes.factors[name][factor]) for factor in left & right & results):
            of_products.update(axis for factor in (left & right) - results for axis in axes.factors[name][factor])
            columns = (axis for factor in (right & results) - left for axis in axes.factors[name][factor])
            of_products.update(axis for axis in columns if "features" not in axes.roles[axis])
    return frozenset(of_products)


def _name(roles: Mapping[str, int], is_of_parameter: bool, is_of_product: bool) -> str:
    """Return the name of an axis that is neither the batch nor experts; for ``is_of_product`` see ``_axes_of_products``."""
    is_between_weights = bool(is_of_parameter and _PRODUCED & roles.keys() and _CONTRACTED & roles.keys())
    if {"rows", "columns"} <= roles.keys():  # queries and keys of a decomposed self-attention
        return "sequence"
    if is_between_weights and _BATCHED & roles.keys():
        return "heads"
    if is_of_parameter and is_of_product and _CONTRACTED & roles.keys():
        return "head"
    for role, name in _BY_ROLE:
        if role in roles and (name not in ("vocab", "channels") or is_of_parameter):
            return name
    if is_of_parameter and "embedding" in roles:
        return "hidden"
    if is_between_weights:
        return "ffn"
    return "features" if is_of_parameter else "rest"


def space_axes(axes: Axes) -> dict[str, tuple[int, ...]]:
    """Return the axes along each spatial dimension, by its name, outermost dimension first.

    If a dimension is split into blocks, these are the axes of the blocks. ``length`` (of sound) counts only where it is the only one.
    """
    inner = {axis for tensors in axes.tensors.values() for tensor in tensors for dimension in tensor for axis in dimension[1:]}
    space = {}
    for role in (*SPACE, "length"):
        with_role = [axis for axis, roles in enumerate(axes.roles) if role in roles]
        space[role] = tuple(axis for axis in with_role if not (axis in inner and _is_inside(axes, axis, role)))
    present = {role: of_role for role, of_role in space.items() if of_role}
    return {role: of_role for role, of_role in present.items() if role in SPACE or len(present) == 1}


def _is_inside(axes: Axes, axis: int, role: str) -> bool:
    """Return whether some dimension holds the axis inside another axis with this role."""
    dimensions = (dimension for tensors in axes.tensors.values() for tensor in tensors for dimension in tensor if axis in dimension)
    return any(role in axes.roles[outer] for dimension in dimensions for outer in dimension[: dimension.index(axis)])


def axes_named(wanted: str, names: Sequence[str]) -> tuple[int, ...]:
    """Return the axes of a name: all of ``"ffn"``, the one of ``"ffn[3]"``.

    Raises:
        ConfigError: there is none.
    """
    matching = tuple(axis for axis, name in enumerate(names) if _matches(wanted, name))
    if not matching:
        known = sorted({name.partition("[")[0] for name in names} - {"rest"})
        meant = did_you_mean(wanted, known)
        raise ConfigError(
            f"the model has no axis {wanted!r}: no loop of that kind runs through it from its inputs, or an operation needs it whole",
            remedy=f"{meant}shard one that it has: {', '.join(known)}",
        )
    return matching


def has_axis(wanted: str, names: Sequence[str]) -> bool:
    """Return whether ``axes_named`` finds axes of a name."""
    return any(_matches(wanted, name) for name in names)


def _matches(wanted: str, name: str) -> bool:
    return wanted in (name, name.partition("[")[0])


def short_names(chosen: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of axes as a plan writes them: ``ffn`` if all axes of this name are chosen, else ``ffn[3]``."""
    short: list[str] = []
    for axis in chosen:
        base = names[axis].partition("[")[0]
        name = base if set(axes_named(base, names)) <= set(chosen) else names[axis]
        if name not in short:
            short.append(name)
    return tuple(short)
