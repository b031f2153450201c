"""The axes that the user assigns to mesh dimensions: by name, or by transformers' tensor-parallel patterns.

axes={"heads": "tensor"}                       every axis of that name; "ffn[3]" one of them
axes={"batch": "tile"}                         another axis than space, which tiles shard in the layers in which that is cheaper
axes={"height[2]": "tile"}                     an axis of space that tiles must shard; the others are planned
tp_plan={"layers.*.mlp.up_proj": "colwise"}    the output axis of the weight: it stays in the result
tp_plan={"layers.*.mlp.down_proj": "rowwise"}  the input axis of the weight: contracted, or looked up
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import fx

from partitioner.options.constraints import TENSOR, Constraints, pattern_expression
from partitioner.options.mode import dimension_named
from partitioner.planner.constraints.tile_grid import fits, tile_axes
from passes.analysis.axes import Axes
from passes.analysis.axis_names import axes_named, batch_axes, space_axes
from passes.ir.errors import ConfigError, did_you_mean
from passes.ir.graph import ModelGraph
from passes.ir.layout import SPACE, Shard
from passes.ir.mesh import DIMENSIONS, ROWS, SEQUENCE, STAGES, TILE, TILES, Mesh
from passes.spmd.propagate.layouts import Layouts

_KEPT = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "local_colwise", "embedding_colwise")
_SUMMED = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "local_packed_rowwise", "local_rowwise", "embedding_rowwise")
_NO_WEIGHTS = "moe_identity_expert"
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "local_params", "moe_tp_experts", _NO_WEIGHTS)

EXPERTS = "experts"
"""The name of axes that a data dimension may shard beside the batch: tokens are then sent to the rank of their expert (all_to_all)."""

_STYLES = {
    **dict.fromkeys(_KEPT, "kept"),
    **dict.fromkeys(_SUMMED, "summed"),
    **dict.fromkeys((*_WHOLE, "ep_dispatch_experts"), "whole"),
    "grouped_gemm": EXPERTS,
    "sequence_parallel": SEQUENCE,
}
"""transformers' style -> the dimension of a weight that is sharded; ``"whole"``: none.

Layouts of inputs and outputs (``_rep``, ``local_``), and sums of partial results and of gradients, are derived.
"""

NAMED_FIRST = ("heads", EXPERTS, "ffn", "vocab", "channels")
"""Axis names by priority, for a dimension of several axes (three, heads, head width)."""


def named_dimensions(constraints: Constraints) -> frozenset[str]:
    """Return the mesh dimensions that the user's axes, patterns and strategies name."""
    named = {dimension_named(where) for where in (constraints.axes or {}).values()}
    return frozenset(named | ({TENSOR} if constraints.tp_plan else set()) | ({SEQUENCE} if constraints.attention else set()))


def check_dimensions(constraints: Constraints, mesh: Mesh) -> None:
    """Raise ConfigError for a mesh dimension that is not in the mesh, or that shards no axes."""
    named = [(f"axes={{{axis!r}: {where!r}}}", dimension_named(where)) for axis, where in (constraints.axes or {}).items()]
    if constraints.tp_plan:
        named.append(("tp_plan", TENSOR))
    if constraints.attention:
        named.append((f"attention={constraints.attention!r}", SEQUENCE))
    for said, dimension in named:
        if dimension not in mesh.names and not _dimensions_named(dimension, mesh):
            is_known = dimension in (*DIMENSIONS, *TILES)
            raise ConfigError(
                f"{said} names the mesh dimension {dimension!r}, and the mesh has {', '.join(mesh.names)}",
                remedy=f'choose one of these, or add it: mode={{"{dimension}": 2, ...}}'
                if is_known
                else f"{did_you_mean(dimension, DIMENSIONS)}a mesh may have the dimensions {', '.join(DIMENSIONS)}",
            )
        if dimension in STAGES:
            raise ConfigError(f"{said}: {dimension!r} cuts the graph, not axes", remedy="use device_map, split_spec or pin for stages")


def constrained_axes(
    graph: ModelGraph, axes: Axes, names: tuple[str, ...], mesh: Mesh, constraints: Constraints
) -> dict[str, tuple[int, ...]]:
    """Return mesh dimension -> the axes that it must shard.

    Raises:
        ConfigError: an axis is unknown, too short, or of the wrong kind; a pattern matches nothing or says what is unknown.
    """
    assigned: dict[str, tuple[int, ...]] = dict.fromkeys(mesh.names, ())
    batch = batch_axes(graph, axes)
    for name, dimension in _named_axes(constraints, mesh):
        where = dimension_named((constraints.axes or {})[name])
        wanted = _without_other_space(axes, mesh, dimension, axes_named(name, names))
        if not wanted:
            continue
        is_routed = dimension in ROWS and all(names[axis].startswith(f"{EXPERTS}[") for axis in wanted)
        of_rows = set(wanted) <= batch and dimension not in TILES
        if (dimension in ROWS) != of_rows and not is_routed:
            kind = "the batch, and experts beside it" if dimension in ROWS else "any axis but the batch"
            raise ConfigError(
                f"axes={{{name!r}: {where!r}}}: {dimension!r} cuts {kind}",
                remedy=f"choose another of {', '.join(mesh.names)}, or leave it out",
            )
        fitting = tuple(axis for axis in wanted if fits(axes, axis, mesh.length(dimension)) or axis in batch)
        if not fitting:
            sizes = ", ".join(sorted({str(axes.sizes[axis]) for axis in wanted}))
            raise ConfigError(
                f"axes={{{name!r}: {where!r}}}: {name} has size {sizes} and cannot be cut into {mesh.length(dimension)} parts",
                remedy="cut an axis that is long enough, over fewer devices",
            )
        assigned[dimension] += tuple(axis for axis in fitting if axis not in assigned[dimension])
    for pattern, style in (constraints.tp_plan or {}).items():
        for axis in _axes_of_pattern(graph, axes, names, pattern, style, mesh.length(TENSOR)):
            if axis not in assigned[TENSOR]:
                assigned[TENSOR] += (axis,)
    return assigned


def check_sharded(axes: Axes, names: tuple[str, ...], mesh: Mesh, constraints: Constraints, layouts: Layouts) -> None:
    """Raise ConfigError for a named axis over which the layouts shard nothing.

    Of several axes that tiles may shard instead of space, one suffices.
    """
    excused = _excused_by_another(names, mesh, constraints, layouts)
    for name, where in (constraints.axes or {}).items():
        dimensions = {mesh.names.index(dimension) for dimension in _dimensions_named(dimension_named(where), mesh)}
        wanted = set(axes_named(name, names))
        shards_op = _shards_any(layouts, wanted, dimensions)
        stored = (layout[index] for layout in layouts.stored.values() for index in dimensions)
        shards_parameter = any(isinstance(placement, Shard) and placement.axis in wanted for placement in stored)
        if not shards_op and not shards_parameter and not wanted & excused:
            taking = _names_taking(axes, names, constraints, layouts, wanted, dimensions)
            beside = f" beside {', '.join(taking)}, which cut all that have it" if taking else ""
            raise ConfigError(
                f"axes={{{name!r}: {where!r}}}: no operation of the model can be cut by {name}{beside}",
                remedy=f"leave it out, or {', '.join(taking)}" if taking else "leave it out, or name another axis",
            )


def _names_taking(
    axes: Axes, names: tuple[str, ...], constraints: Constraints, layouts: Layouts, wanted: set[int], dimensions: Collection[int]
) -> list[str]:
    """Return the other names of the user whose axes cut calls that have a wanted axis."""
    cuts = (layouts.cuts[name][index] for name, own in axes.of_calls.items() if own & wanted for index in dimensions)
    cutting = {cut.axis for cut in cuts if cut is not None} - wanted
    return [name for name in constraints.axes or {} if cutting.intersection(axes_named(name, names))]


def _excused_by_another(names: tuple[str, ...], mesh: Mesh, constraints: Constraints, layouts: Layouts) -> frozenset[int]:
    """Return the axes that ``check_sharded`` need not find sharded: of those that tiles may shard instead of space, one in use suffices.

    axes={"batch": "tile", "channels": "tile"}    both, if some layer is sharded by either; else none
    """
    for_tiles = [name for name, where in (constraints.axes or {}).items() if dimension_named(where) == TILE]
    axes = [axis for name in for_tiles for axis in axes_named(name, names)]
    not_spatial = frozenset(axis for axis in axes if not names[axis].startswith((*SPACE, "length")))
    tile_dimensions = [index for index, name in enumerate(mesh.names) if name in TILES]
    return not_spatial if _shards_any(layouts, not_spatial, tile_dimensions) else frozenset()


def _shards_any(layouts: Layouts, axes: Collection[int], dimensions: Collection[int]) -> bool:
    """Return whether one of the mesh dimensions (by index) shards an op along one of the axes."""
    cuts = (cuts_of_op[index] for cuts_of_op in layouts.cuts.values() for index in dimensions)
    return any(cut is not None and cut.axis in axes for cut in cuts)


def _dimensions_named(dimension: str, mesh: Mesh) -> tuple[str, ...]:
    """Return the dimensions of a mesh with a name; ``tile`` stands for all dimensions of a grid of tiles."""
    if dimension == TILE:
        return tuple(name for name in mesh.names if name in (TILE, *TILES))
    return (dimension,) if dimension in mesh.names else ()


def _without_other_space(axes: Axes, mesh: Mesh, dimension: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the wanted axes without those of space that another dimension of a grid of tiles shards (height or width)."""
    if dimension not in TILES:
        return wanted
    own = tile_axes(axes, mesh, dimension)
    others = {axis for each in space_axes(axes).values() for axis in each}.difference(own)
    return tuple(axis for axis in wanted if axis not in others)


def _named_axes(constraints: Constraints, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Yield (name of axes, mesh dimension) of all assignments by the user."""
    for name, where in (constraints.axes or {}).items():
        yield from ((name, dimension) for dimension in _dimensions_named(dimension_named(where), mesh))


# -- patterns ------------------------------------------------------------------------------------------------------------------------


def _axes_of_pattern(graph: ModelGraph, axes: Axes, names: tuple[str, ...], pattern: str, style: str, count: int) -> Iterator[int]:
    """Yield the axes that one entry of ``tp_plan`` shards over ``count`` ranks; raise ConfigError if there are none."""
    kind = _STYLES.get(style)
    if kind is None:
        raise ConfigError(f"tp_plan[{pattern!r}]: there is no style {style!r}", remedy=f"choose one of {', '.join(_STYLES)}")
    if style == _NO_WEIGHTS:
        return
    matching = _parameters_matching(graph, pattern, inside=kind == "whole")
    if kind in ("whole", SEQUENCE):
        yield from axes_named(SEQUENCE, names) if kind == SEQUENCE else ()
        return
    several: list[int] = []
    for name in matching:
        several += _axes_of_weight(graph, axes, names, name, kind, count)
    if not several:
        raise ConfigError(
            f"tp_plan[{pattern!r}]: no weight of it can be cut {style} into {count} parts",
            remedy="leave the pattern out, or cut over fewer devices",
        )
    yield from several


def _parameters_matching(graph: ModelGraph, pattern: str, *, inside: bool) -> list[str]:
    """Return the parameters that match a pattern, themselves or by their module; leading parts of names may be left out.

    Args:
        inside: whether parameters of modules inside a matching one match, too.

    Raises:
        ConfigError: there is none.
    """
    expression = pattern_expression(pattern)
    own = rf"{expression}(\..+)?" if inside else rf"{expression}(\.[^.]+)?"
    by_name = {name: placeholder for placeholder, name in graph.parameters.items()}
    by_name |= {alias: by_name[name] for alias, name in graph.aliases.items() if name in by_name}
    for whole in (own, rf"(.+\.)?{own}"):
        found = [placeholder for name, placeholder in by_name.items() if re.fullmatch(whole, name)]
        if found:
            return list(dict.fromkeys(found))
    modules = sorted({re.sub(r"\d+", "*", name.rpartition(".")[0]) for name in by_name})
    raise ConfigError(
        f"tp_plan: the pattern {pattern!r} matches no module with parameters",
        remedy=f"the model has {', '.join(modules[:12])}{', ...' if len(modules) > 12 else ''}",
    )


def _axes_of_weight(graph: ModelGraph, axes: Axes, names: tuple[str, ...], name: str, kind: str, count: int) -> Iterator[int]:
    """Yield the axis to shard of a matrix over ``count`` ranks: of its first dimension that is ``"kept"`` or ``"summed"``.

    The dimension of experts is none of these; ``"experts"``: of the outermost one.
    """
    if name not in axes.tensors or len(axes.of(name)) < 2:
        return
    for dimension, each in enumerate(axes.of(name)):
        if kind == EXPERTS:
            is_wanted = dimension == 0
        else:
            is_of_experts = any(names[axis].startswith(f"{EXPERTS}[") for axis in each)
            is_wanted = not is_of_experts and _kind_of(graph, axes, name, dimension) == kind
        if not is_wanted:
            continue
        fitting = [axis for axis in each if fits(axes, axis, count)]
        if fitting:
            yield min(fitting, key=lambda axis: _priority(names[axis]))
            return


def _priority(name: str) -> int:
    """Return the place of an axis name in ``NAMED_FIRST``."""
    base = name.partition("[")[0]
    return NAMED_FIRST.index(base) if base in NAMED_FIRST else len(NAMED_FIRST)


def _kind_of(graph: ModelGraph, axes: Axes, name: str, dimension: int) -> str | None:
    """Return whether the first call with several operands that loops over a dimension of a weight keeps or sums it, or None.

    Returns:
        ``"kept"`` if its loops are dimensions of the result, else ``"summed"``.
    """
    for node in _readers(graph, name):
        loops = axes.loops.get(node.name)
        if loops is None or len(loops.operands) < 2:
            continue
        place = next(place for place, operand in enumerate(axes.operands[node.name]) if _source(operand) == name)
        loop_of = {axis: loop for loop, axes_of_loop in enumerate(axes.factors[node.name]) for axis in axes_of_loop}
        of_dimension = {loop_of[axis] for axis in axes.of(name)[dimension] if axis in loop_of}
        of_result = {loop for result in loops.results for result_dimension in result for loop in result_dimension}
        of_operand = {loop for operand_dimension in loops.operands[place] for loop in operand_dimension}
        if of_dimension & of_operand:
            return "kept" if of_dimension <= of_result else "summed"
    return None


def _readers(graph: ModelGraph, name: str) -> Iterator[fx.Node]:
    """Yield the calls that read a parameter, directly or through transposes and casts."""
    waiting = [next(node for node in graph.graph.nodes if node.name == name)]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and _source(user) == name:
                waiting.append(user)
            elif user.op == "call_function":
                yield user


def _source(node: fx.Node) -> str:
    """Return the name of the node that a value is a chain of transposes and casts of."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and _only_transposes(node):
        node = node.all_input_nodes[0]
    return node.name


def _only_transposes(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "").partition(".")[0]
    return name in ("t", "transpose", "permute", "to", "_to_copy", "numpy_T", "mT")
