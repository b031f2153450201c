"""Which axes a mesh cuts, and how the parameters lie over it: read from the blocks that ranks hold.

axis             size         over    a rank has
heads               4         tensor  2
ffn                48         tensor  24
height, 6 of 8     64 to 512  tile0   32 to 256

blocks.*.up.weight    [ffn/tensor, hidden]    (48, 12)    (24, 12)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from partitioner.reports.communication.value_layouts import axes_text
from partitioner.reports.sources import Explained
from partitioner.reports.tables.table import Table
from passes.analysis.axes import Axes
from passes.analysis.axis_names import axes_named, axis_names
from passes.ir.layout import BATCH
from passes.ir.mesh import STORED, WIDTH, Mesh
from passes.spmd.shards import Block

__all__ = ["axes_section", "parameters_section", "tensor_layout"]


def axes_section(explained: Explained) -> Table:
    """Every axis that is cut: its name, its size, the mesh dimension, and how much of it a rank has."""
    plan, mesh, axes = explained.plan, explained.mesh, explained.cut.axes
    names = axis_names(explained.cut.graph, axes)
    rows = [("axis", "size", "over", "a rank has")]
    for (base, dimension), chosen in _by_name(plan.axes).items():
        count = mesh.length(dimension)
        cut = {axis for name in chosen for axis in axes_named(name, names)}
        sizes = [plan.batch_size] if base == BATCH else sorted({axes.sizes[axis] for axis in cut}, key=str)
        words = chosen[0] if len(chosen) == 1 else f"{base}, {len(cut)} of {len(axes_named(base, names))}"
        counts = sorted(set(mesh.widths), reverse=True) if mesh.widths and dimension == WIDTH else [count]
        rows.append((words, _any_of(map(str, sizes)), dimension, "; ".join(_has(sizes, each, len(counts)) for each in counts)))
    stored = [name for name in mesh.names if name in STORED]
    rows += [("parameters", "", name, "a part of each, gathered where it is used") for name in stored]
    return Table(rows, "<><<")


def _has(sizes: Sequence[object], count: int, n_widths: int) -> str:
    """How much of axes a rank has; of stages with degrees of their own, on how many ranks the stage is."""
    parts = _any_of(_part(size, count) for size in sizes)
    return parts if n_widths == 1 else f"{parts} of a stage on {count}"


def _by_name(cut: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Axes of one name that one mesh dimension cuts, together."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, dimension in cut:
        found.setdefault((name.partition("[")[0], dimension), []).append(name)
    return found


def _any_of(words: Iterable[str]) -> str:
    """``"8 or 16"``; of more than three numbers, from which to which."""
    found = list(dict.fromkeys(words))
    numbers = sorted(int(word) for each in found for word in each.split(" or ") if word.isdigit())
    return " or ".join(found) if len(found) <= _FEW or not numbers else f"{numbers[0]} to {numbers[-1]}"


_FEW = 3


def _part(size: object, count: int) -> str:
    if not isinstance(size, int):
        return f"{size}/{count}"
    return str(size // count) if size % count == 0 else f"{size // count + 1} or {size // count}"


def parameters_section(explained: Explained) -> Table:
    """How every parameter lies; those of equal layers in one line."""
    graph, mesh, axes, blocks = explained.graph, explained.mesh, explained.cut.axes, explained.blocks
    names = axis_names(explained.cut.graph, axes)
    found: dict[tuple[str, ...], list[str]] = {}
    for placeholder, name in graph.parameters.items():
        if placeholder not in blocks:
            continue
        held = blocks[placeholder]
        shape = next(iter(held.values())).shape
        parts = " or ".join(dict.fromkeys(str(block.part) for block in held.values()))
        layout = _layout(axes, names, placeholder, held, mesh)
        alike = (re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name), layout, str(shape), parts)
        found.setdefault(alike, []).append(name)
    rows = [("parameter", "", "layout", "shape", "a rank has")]
    for (pattern, layout, whole, parts), members in found.items():
        rows.append((pattern if len(members) > 1 else members[0], f"x {len(members)}" if len(members) > 1 else "", layout, whole, parts))
    return Table(rows, "<<<<<", "[axis/mesh dimension it is cut over, ...]; a*b is a dimension that holds two axes, a the outer one")


def tensor_layout(explained: Explained, placeholder: str) -> str:
    """The axes of a parameter's dimensions, with what they are cut over."""
    names = axis_names(explained.cut.graph, explained.cut.axes)
    return _layout(explained.cut.axes, names, placeholder, explained.blocks[placeholder], explained.mesh)


def _layout(axes: Axes, names: tuple[str, ...], placeholder: str, held: Mapping[int, Block], mesh: Mesh) -> str:
    """The axes of each dimension, with what they are cut over."""
    return axes_text(axes, names, axes.of(placeholder), lambda position, _: _cut_over(held, position, mesh))


def _cut_over(held: Mapping[int, Block], position: int, mesh: Mesh) -> list[str]:
    """The mesh dimensions along which ranks hold different parts of an axis."""
    found = []
    for name in mesh.cutting.names:
        pairs = ((rank, other) for rank in held for other in mesh.group(rank, (name,)) if other in held)
        if any(_interval(held[rank], position) != _interval(held[other], position) for rank, other in pairs):
            found.append(name)
    return found


def _interval(block: Block, position: int) -> tuple[int, int] | None:
    return None if block.is_whole else block.intervals[position]
