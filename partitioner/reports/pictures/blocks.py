"""The blocks of a tensor and the ranks that hold them, as a matrix: text for a terminal, SVG in proportion.

The first dimension of the tensor goes down, all others together go across. An axis that is not the outermost of its dimension is sharded in
several intervals of that dimension:

    query_key_value.weight  [3*heads/tensor*head, hidden]  float32 (24, 8)

             0-7
      0-3    rank 0        queries of the first head
      4-7    rank 1
      8-11   rank 0        keys
      12-15  rank 1
      16-19  rank 0        values
      20-23  rank 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from cost_models.hardware.units import format_bytes
from cost_models.svg import document
from partitioner.reports.explain.sharding import tensor_layout
from partitioner.reports.pictures.colours import STAGES
from partitioner.reports.pictures.diagram_svg import svg_style
from partitioner.reports.sources import Explained
from partitioner.reports.tables.table import align
from passes.ir.mesh import rank_numbers
from passes.spmd.shards import Block, Intervals

_MOST = 64
"""Largest number of rows or columns; of more, the first are shown."""


@dataclass(frozen=True)
class BlockTable:
    """The blocks of a tensor as a matrix.

    Attributes:
        title: the name of the tensor.
        detail: its layout, dtype and shape.
        shape: the shape of the tensor.
        rows, columns: intervals (start, stop) of the first dimension, and of all others together.
        owners: for each row and column, the ranks that hold this block.
        held: a line for each rank that holds a block: its shape and bytes.
        is_cut_off: whether rows or columns are left out.
    """

    title: str
    detail: str
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    owners: tuple[tuple[tuple[int, ...], ...], ...]
    held: tuple[str, ...]
    is_cut_off: bool


@dataclass(frozen=True)
class _Interval:
    """An interval of flattened axes, [start, stop), that no edge of a block divides; ``index`` is its start on each axis."""

    start: int
    stop: int
    index: tuple[int, ...]


def block_table(title: str, detail: str, blocks: Mapping[int, Block], held: Sequence[str]) -> BlockTable:
    """Arrange the blocks of a tensor, by rank, as a matrix; neighbouring rows or columns with the same owners become one."""
    shape = next(iter(blocks.values())).shape
    axis_sizes = next((block.unfolded for block in blocks.values() if not block.is_whole), shape)
    parts = {rank: block.intervals for rank, block in blocks.items() if not block.is_whole}  # intervals on each axis
    of_axes = [[each for intervals in parts.values() for each in intervals[axis]] for axis in range(len(axis_sizes))]
    edges = [{edge for interval in intervals for edge in interval} for intervals in of_axes]
    n_row_axes = _n_axes_of_first(shape, axis_sizes)
    rows = _undivided_intervals(axis_sizes[:n_row_axes], edges[:n_row_axes])
    columns = _undivided_intervals(axis_sizes[n_row_axes:], edges[n_row_axes:])

    owners: list[list[list[int]]] = [[[] for _ in columns] for _ in rows]
    for rank in blocks:
        of_rows, of_columns = (_within(parts.get(rank), each, start) for each, start in ((rows, 0), (columns, n_row_axes)))
        for row, column in itertools.product(of_rows, of_columns):
            owners[row][column].append(rank)
    cells = [[tuple(ranks) for ranks in of_row] for of_row in owners]
    merged_rows = _merge_equal(rows, cells)
    cells_by_column = [list(column) for column in zip(*(cells_of_row for _, cells_of_row in merged_rows), strict=True)]
    merged_columns = _merge_equal(columns, cells_by_column)
    shown_rows, shown_columns = merged_rows[:_MOST], merged_columns[:_MOST]
    return BlockTable(
        title,
        detail,
        shape,
        tuple(interval for interval, _ in shown_rows),
        tuple(interval for interval, _ in shown_columns),
        tuple(tuple(cells_of_column[row] for _, cells_of_column in shown_columns) for row in range(len(shown_rows))),
        tuple(held),
        len(merged_rows) > _MOST or len(merged_columns) > _MOST,
    )


def _n_axes_of_first(shape: Sequence[int], axis_sizes: Sequence[int]) -> int:
    """Return how many axes make up the first dimension; 0 for a vector, which is drawn across."""
    if len(shape) < 2:
        return 0
    return next(count for count in range(len(axis_sizes) + 1) if math.prod(axis_sizes[:count]) == shape[0])


def _undivided_intervals(sizes: Sequence[int], edges: Sequence[set[int]]) -> list[_Interval]:
    """Divide flattened axes at the edges of blocks: at every index of the axes outside the innermost sharded one, and at its edges.

    Args:
        sizes: the sizes of the axes, the outermost first.
        edges: for each axis, where blocks start or stop.

    For axes (3, 4, 2), of which the second is sharded at 2, the intervals are 0-3, 4-7, 8-11, ..., 20-23.
    """
    innermost = max((axis for axis, at in enumerate(edges) if at - {0, sizes[axis]}), default=-1)
    if innermost < 0:
        return [_Interval(0, math.prod(sizes), (0,) * len(sizes))]
    boundaries = sorted(edges[innermost] | {0, sizes[innermost]})
    inner_size = math.prod(sizes[innermost + 1 :])
    inner_index = (0,) * (len(sizes) - innermost - 1)
    intervals = []
    for number, outer in enumerate(itertools.product(*(range(size) for size in sizes[:innermost]))):
        base = number * sizes[innermost]
        for start, stop in itertools.pairwise(boundaries):
            intervals.append(_Interval((base + start) * inner_size, (base + stop) * inner_size, (*outer, start, *inner_index)))
    return intervals


def _within(block: Sequence[Intervals] | None, intervals: Sequence[_Interval], first_axis: int) -> list[int]:
    """Return the numbers of the intervals, of axes from ``first_axis`` on, that a block covers; None is the whole tensor."""
    if block is None:
        return list(range(len(intervals)))
    axes = block[first_axis:]
    return [
        number
        for number, interval in enumerate(intervals)
        if all(any(start <= at < stop for start, stop in each) for each, at in zip(axes, interval.index, strict=False))
    ]


Cells = list[tuple[int, ...]]
"""The owners of the blocks of one row, or of one column."""


def _merge_equal(intervals: Sequence[_Interval], cells: Sequence[Cells]) -> list[tuple[tuple[int, int], Cells]]:
    """Merge neighbouring intervals with equal cells; return ((start, stop), cells) of each."""
    merged: list[tuple[tuple[int, int], Cells]] = []
    for interval, owners in zip(intervals, cells, strict=True):
        start = interval.start
        if merged and merged[-1][1] == owners:
            start = merged.pop()[0][0]
        merged.append(((start, interval.stop), owners))
    return merged


def blocks_text(table: BlockTable) -> str:
    """Return the table for a terminal."""
    rows = [("", *map(_range, table.columns))]
    for interval, owners in zip(table.rows, table.owners, strict=True):
        rows.append((_range(interval) if len(table.shape) > 1 else "", *map(_ranks, owners)))
    lines = [f"  {line}" for line in align(rows, "<" * len(rows[0]))]
    more = ["  ..."] if table.is_cut_off else []
    return "\n".join([f"{table.title}  {table.detail}", "", *lines, *more, "", *(f"  {line}" for line in table.held)])


def _range(interval: tuple[int, int]) -> str:
    """Format ``"4-7"`` for the interval (4, 8); ``"4"`` for (4, 5)."""
    start, stop = interval
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_numbers(ranks)}" if ranks else "no rank"


_WIDTH, _HEIGHT, _LEFT, _TOP, _LEAST = 400, 220, 64, 58, 15


def blocks_svg(table: BlockTable) -> str:
    """Draw the blocks in proportion, one colour for each set of owners; very small blocks are enlarged."""
    columns = _extents(table.columns, _WIDTH, 44)
    rows = _extents(table.rows, _HEIGHT if len(table.shape) > 1 else 34, _LEAST)
    colour = {ranks: index for index, ranks in enumerate(dict.fromkeys(itertools.chain.from_iterable(table.owners)))}
    bottom = _TOP + rows[-1][1]
    height = bottom + 22 + 15 * len(table.held)
    width = _LEFT + max(columns[-1][1], 340) + 16
    parts = [
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/><text class="h" x="12" y="20">{escape(table.title)}</text>',
        f'<text class="f" x="12" y="35">{escape(table.detail)}</text>',
    ]
    for (left, right), interval in zip(columns, table.columns, strict=True):
        parts.append(f'<text class="f c" x="{_LEFT + (left + right) / 2:.1f}" y="{_TOP - 6}">{_range(interval)}</text>')
    for (upper, lower), interval, owners in zip(rows, table.rows, table.owners, strict=True):
        middle = _TOP + (upper + lower) / 2 + 4
        label = _range(interval) if len(table.shape) > 1 else ""
        parts.append(f'<text class="f e" x="{_LEFT - 6}" y="{middle:.1f}">{label}</text>')
        for (left, right), ranks in zip(columns, owners, strict=True):
            parts.append(
                f'<rect class="s{colour[ranks] % len(STAGES)}" x="{_LEFT + left + 1:.1f}" y="{_TOP + upper + 0.5:.1f}" '
                f'width="{right - left - 2:.1f}" height="{lower - upper - 1:.1f}" rx="2"/>'
            )
            parts.append(f'<text class="c" x="{_LEFT + (left + right) / 2:.1f}" y="{middle:.1f}">{_ranks(ranks)}</text>')
    parts += [f'<text class="f" x="12" y="{bottom + 18 + 15 * index:.0f}">{escape(line)}</text>' for index, line in enumerate(table.held)]
    return document("d", width, height, table.title, svg_style(), parts)


def _extents(intervals: Sequence[tuple[int, int]], length: float, least: float) -> list[tuple[float, float]]:
    """Return (start, end) of each interval in pixels: in proportion to a total ``length``, but each at least ``least`` long."""
    whole = intervals[-1][1] - intervals[0][0]
    sizes = [max((stop - start) / whole * length, least) for start, stop in intervals]
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


_MOST_RANKS = 64
"""Ranks that have a line each."""


def held_blocks(explained: Explained, placeholder: str, name: str) -> BlockTable:
    """Return the table of the blocks of a parameter or buffer, given by its placeholder; ``name`` is the title."""
    dtype = next(node.meta["val"].dtype for node in explained.graph.graph.nodes if node.name == placeholder)
    blocks = dict(sorted(explained.blocks[placeholder].items()))
    held = []
    for rank, block in itertools.islice(blocks.items(), _MOST_RANKS):
        whole = ", the whole" if block.is_whole and len(blocks) > 1 else ""
        held.append(f"rank {rank} holds {block.part}, {format_bytes(math.prod(block.part) * dtype.itemsize)}{whole}")
    if len(blocks) > _MOST_RANKS:
        held.append(f"and {len(blocks) - _MOST_RANKS} more ranks")
    detail = f"{tensor_layout(explained, placeholder)}  {str(dtype).removeprefix('torch.')} {next(iter(blocks.values())).shape}"
    return block_table(name, detail, blocks, held)


def cut_weights(explained: Explained, most: int) -> list[BlockTable]:
    """Return the tables of sharded weights: the first weight of each layout, at most ``most``; vectors are left out."""
    by_layout: dict[str, BlockTable] = {}
    for placeholder, name in explained.graph.parameters.items():
        if len(by_layout) == most:
            break
        blocks = explained.blocks.get(placeholder, {})
        is_cut = any(len(block.shape) > 1 and not block.is_whole for block in blocks.values())
        layout = tensor_layout(explained, placeholder) if is_cut else ""
        if layout and layout not in by_layout:
            by_layout[layout] = held_blocks(explained, placeholder, name)
    return list(by_layout.values())
