"""The sharded axes of a mesh, and the layouts of parameters, which are read from the blocks that ranks hold.

axis             size         over    a rank has
heads               4         tensor  2
ffn                48         tensor  24
height, 6 of 8     64 to 512  tile0   32 to 256

blocks.*.up.weight    [ffn/tensor, hidden]    (48, 12)    (24, 12)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from partitioner.reports.communication.value_layouts import axes_text
from partitioner.reports.sources import Explained
from partitioner.reports.tables.table import Table
from passes.analysis.axis_names import axes_named
from passes.ir.layout import BATCH
from passes.ir.mesh import STORED, WIDTH, Mesh
from passes.spmd.shards import Block

__all__ = ["axes_section", "parameters_section", "tensor_layout"]

_FEW = 3


def axes_section(explained: Explained) -> Table:
    """Return the table of sharded axes: name, size, mesh dimension, size of a rank's part."""
    plan, mesh, axes = explained.plan, explained.mesh, explained.planned.widest.axes
    names = explained.planned_axis_names
    rows = [("axis", "size", "over", "a rank has")]
    for (base, dimension), chosen in _group_by_base(plan.axes).items():
        sharded = {axis for name in chosen for axis in axes_named(name, names)}
        sizes = [plan.batch_size] if base == BATCH else sorted({axes.sizes[axis] for axis in sharded}, key=str)
        words = chosen[0] if len(chosen) == 1 else f"{base}, {len(sharded)} of {len(axes_named(base, names))}"
        has_stage_degrees = mesh.widths and dimension == WIDTH  # stages have their own tensor-parallel degrees
        degrees = sorted(set(mesh.widths), reverse=True) if has_stage_degrees else [mesh.length(dimension)]
        parts = [_any_of(_part_size(size, degree) for size in sizes) for degree in degrees]
        if len(degrees) > 1:
            parts = [f"{part} of a stage on {degree}" for part, degree in zip(parts, degrees, strict=True)]
        rows.append((words, _any_of(map(str, sizes)), dimension, "; ".join(parts)))
    stored = [name for name in mesh.names if name in STORED]
    rows += [("parameters", "", name, "a part of each, gathered where it is used") for name in stored]
    return Table(rows, "<><<")


def _group_by_base(sharded: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Group (axis, mesh dimension) by the axis name without its index; ``height[0]`` and ``height[1]`` are two axes ``height``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, dimension in sharded:
        groups.setdefault((name.partition("[")[0], dimension), []).append(name)
    return groups


def _any_of(words: Iterable[str]) -> str:
    """Format ``"8 or 16"``; for more than ``_FEW`` different words, their smallest and largest number: ``"32 to 256"``."""
    different = list(dict.fromkeys(words))
    numbers = sorted(int(number) for word in different for number in word.split(" or ") if number.isdigit())
    return " or ".join(different) if len(different) <= _FEW or not numbers else f"{numbers[0]} to {numbers[-1]}"


def _part_size(size: object, count: int) -> str:
    """Format the size of one of ``count`` parts of an axis: ``"24"``, ``"3 or 2"`` for uneven parts, ``"batch/2"`` for symbols."""
    if not isinstance(size, int):
        return f"{size}/{count}"
    return str(size // count) if size % count == 0 else f"{size // count + 1} or {size // count}"


def parameters_section(explained: Explained) -> Table:
    """Return the table of the layouts of parameters; the same parameter of equal layers is one row: ``"blocks.*.up.weight"``."""
    groups: dict[tuple[str, ...], list[str]] = {}  # (pattern of names, layout, shape, shapes of parts) -> parameters
    for placeholder, name in explained.graph.parameters.items():
        if placeholder not in explained.blocks:
            continue
        blocks = explained.blocks[placeholder]
        shape = next(iter(blocks.values())).shape
        parts = " or ".join(dict.fromkeys(str(block.part) for block in blocks.values()))
        layout = tensor_layout(explained, placeholder)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
        groups.setdefault((pattern, layout, str(shape), parts), []).append(name)
    rows: list[tuple[str, ...]] = [("parameter", "", "layout", "shape", "a rank has")]
    for (pattern, *texts), members in groups.items():
        name, times = (pattern, f"x {len(members)}") if len(members) > 1 else (members[0], "")
        rows.append((name, times, *texts))
    return Table(rows, "<<<<<", "[axis/mesh dimension it is cut over, ...]; a*b is a dimension that holds two axes, a the outer one")


def tensor_layout(explained: Explained, placeholder: str) -> str:
    """Return the layout of a parameter or buffer: ``"[ffn/tensor, hidden]"``."""
    axes, blocks = explained.planned.widest.axes, explained.blocks[placeholder]
    in_blocks: list[int | None] = []  # for each axis its place in blocks, where a dimension of segments has one
    for of_dimension in axes.of(placeholder):
        first = sum(place is not None for place in in_blocks)
        has_segments = bool(axes.segments_of(of_dimension))
        in_blocks += [None if has_segments and index else first + index for index in range(len(of_dimension))]

    def over(position: int, _dimension: int) -> list[str]:
        place = in_blocks[position]
        return [] if place is None else _mesh_dimensions_of_axis(blocks, place, explained.mesh)

    names = explained.planned_axis_names
    return explained.once(("layout", placeholder), lambda: axes_text(axes, names, axes.of(placeholder), over))


def _mesh_dimensions_of_axis(blocks: Mapping[int, Block], position: int, mesh: Mesh) -> list[str]:
    """Return the mesh dimensions along which ranks hold different intervals of an axis, given by its position in the tensor."""
    intervals = {rank: None if block.is_whole else block.intervals[position] for rank, block in blocks.items()}
    groups = {name: _groups(mesh, name, tuple(intervals)) for name in mesh.cutting.names}
    return [name for name in groups if any(len({intervals[rank] for rank in group}) > 1 for group in groups[name])]


@functools.lru_cache(maxsize=64)
def _groups(mesh: Mesh, name: str, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of some ranks along a mesh dimension."""
    members = frozenset(ranks)
    return tuple(dict.fromkeys(tuple(other for other in mesh.group(rank, (name,)) if other in members) for rank in ranks))
