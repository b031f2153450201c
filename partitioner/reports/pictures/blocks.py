"""Which rank holds which block of a tensor, as a table of blocks: text for a terminal, SVG in proportion.

A tensor is a matrix here: its first dimension down, all others across. Where a cut axis is inside a dimension, its blocks are runs:

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

from cost_models.svg import document
from partitioner.reports.module_names import rank_numbers
from partitioner.reports.pictures.colours import STAGES
from partitioner.reports.pictures.diagram_svg import SVG_STYLE
from partitioner.reports.tables.table import align
from passes.spmd.shards import Block

__all__ = ["BlockTable", "block_table", "blocks_svg", "blocks_text"]

_MOST = 64
"""Lines or columns of a table; of more, the first are shown."""


@dataclass(frozen=True)
class BlockTable:
    """The blocks of a tensor as a matrix.

    Attributes:
        title: what tensor it is.
        detail: its layout, dtype and shape.
        shape: of the tensor.
        rows, columns: intervals of the first dimension, and of all others together.
        owners: for each row and column, the ranks that hold what is there.
        held: for each rank that holds something, in words.
        is_cut_off: whether there are more rows or columns.
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
class _Run:
    """An interval of a dimension, and where it is on each of the dimension's axes."""

    start: int
    stop: int
    index: tuple[int, ...]


def block_table(title: str, detail: str, blocks: Mapping[int, Block], held: Sequence[str]) -> BlockTable:
    """The table.

    Args:
        blocks: rank -> what it holds.
        held: a line for each rank.
    """
    shape = next(iter(blocks.values())).shape
    axes = {rank: _intervals(block) for rank, block in blocks.items()}
    unfolded = next((block.unfolded for block in blocks.values() if not block.is_whole), shape)
    split = _axes_of_first(shape, unfolded)
    cut = [{edge for intervals in axes.values() if intervals for edge in intervals[axis]} for axis in range(len(unfolded))]
    rows = _runs(unfolded[:split], cut[:split])
    columns = _runs(unfolded[split:], cut[split:])

    def owners(row: _Run, column: _Run) -> tuple[int, ...]:
        index = row.index + column.index
        return tuple(rank for rank, intervals in axes.items() if not intervals or _contains(intervals, index))

    table = [[owners(row, column) for column in columns] for row in rows]
    lines = _merged(rows, table)
    across = _merged(columns, [list(each) for each in zip(*(cells for _, cells in lines), strict=True)])
    shown, beside = lines[:_MOST], across[:_MOST]
    return BlockTable(
        title,
        detail,
        shape,
        tuple(interval for interval, _ in shown),
        tuple(interval for interval, _ in beside),
        tuple(tuple(cells[row] for _, cells in beside) for row in range(len(shown))),
        tuple(held),
        len(lines) > _MOST or len(across) > _MOST,
    )


def _intervals(block: Block) -> tuple[tuple[int, int], ...]:
    """Of each axis; none for the whole."""
    return () if block.is_whole else block.intervals


def _axes_of_first(shape: Sequence[int], unfolded: Sequence[int]) -> int:
    """How many axes make up the first dimension; none for a vector, which is drawn across."""
    if len(shape) < 2:
        return 0
    return next(count for count in range(len(unfolded) + 1) if math.prod(unfolded[:count]) == shape[0])


def _runs(sizes: Sequence[int], cut: Sequence[set[int]]) -> list[_Run]:
    """The intervals in which nothing changes: every index of the axes outside the innermost one that is cut, and its parts."""
    innermost = max((axis for axis, edges in enumerate(cut) if edges - {0, sizes[axis]}), default=-1)
    edges = sorted(cut[innermost] | {0, sizes[innermost]}) if innermost >= 0 else [0, 1]
    inner = math.prod(sizes[innermost + 1 :])
    rest = (0,) * (len(sizes) - innermost - 1)
    runs = []
    for number, outer in enumerate(itertools.product(*(range(size) for size in sizes[: max(innermost, 0)]))):
        for start, stop in itertools.pairwise(edges):
            base = number * (sizes[innermost] if innermost >= 0 else 1)
            runs.append(_Run((base + start) * inner, (base + stop) * inner, (*outer, start, *rest) if innermost >= 0 else rest))
    return runs


def _contains(intervals: Sequence[tuple[int, int]], index: Sequence[int]) -> bool:
    return all(start <= place < stop for (start, stop), place in zip(intervals, index, strict=True))


Cells = list[tuple[int, ...]]


def _merged(runs: Sequence[_Run], cells: Sequence[Cells]) -> list[tuple[tuple[int, int], Cells]]:
    """Neighbours that are held alike as one."""
    found: list[tuple[tuple[int, int], Cells]] = []
    for run, each in zip(runs, cells, strict=True):
        start, stop = run.start, run.stop
        if found and found[-1][1] == each:
            found[-1] = ((found[-1][0][0], stop), each)
        else:
            found.append(((start, stop), each))
    return found


# -- text and SVG ----------------------------------------------------------------------------------------------------------------------


def blocks_text(table: BlockTable) -> str:
    """For a terminal."""
    rows = [("", *map(_range, table.columns))]
    rows += [
        (_range(row) if len(table.shape) > 1 else "", *map(_ranks, cells)) for row, cells in zip(table.rows, table.owners, strict=True)
    ]
    lines = [f"  {line}" for line in align(rows, "<" * len(rows[0]))]
    more = ["  ..."] if table.is_cut_off else []
    return "\n".join([f"{table.title}  {table.detail}", "", *lines, *more, "", *(f"  {line}" for line in table.held)])


def _range(interval: tuple[int, int]) -> str:
    start, stop = interval
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_numbers(ranks)}" if ranks else "no rank"


_WIDTH, _HEIGHT, _LEFT, _TOP, _LEAST = 400, 220, 64, 58, 15


def blocks_svg(table: BlockTable) -> str:
    """A picture in proportion, as far as the smallest block can still be seen."""
    columns, rows = _places(table.columns, _WIDTH, 44), _places(table.rows, _HEIGHT if len(table.shape) > 1 else 34, _LEAST)
    colour = {ranks: index for index, ranks in enumerate(dict.fromkeys(cell for cells in table.owners for cell in cells))}
    bottom = _TOP + rows[-1][1]
    height = bottom + 22 + 15 * len(table.held)
    width = _LEFT + max(columns[-1][1], 340) + 16
    parts = [
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/><text class="h" x="12" y="20">{escape(table.title)}</text>',
        f'<text class="f" x="12" y="35">{escape(table.detail)}</text>',
    ]
    for (left, right), interval in zip(columns, table.columns, strict=True):
        parts.append(f'<text class="f c" x="{_LEFT + (left + right) / 2:.1f}" y="{_TOP - 6}">{_range(interval)}</text>')
    for (top, low), interval, cells in zip(rows, table.rows, table.owners, strict=True):
        middle = _TOP + (top + low) / 2 + 4
        across = _range(interval) if len(table.shape) > 1 else ""
        parts.append(f'<text class="f e" x="{_LEFT - 6}" y="{middle:.1f}">{across}</text>')
        for (left, right), ranks in zip(columns, cells, strict=True):
            parts.append(
                f'<rect class="s{colour[ranks] % len(STAGES)}" x="{_LEFT + left + 1:.1f}" y="{_TOP + top + 0.5:.1f}" '
                f'width="{right - left - 2:.1f}" height="{low - top - 1:.1f}" rx="2"/>'
            )
            parts.append(f'<text class="c" x="{_LEFT + (left + right) / 2:.1f}" y="{middle:.1f}">{_ranks(ranks)}</text>')
    parts += [f'<text class="f" x="12" y="{bottom + 18 + 15 * index:.0f}">{escape(line)}</text>' for index, line in enumerate(table.held)]
    return document("d", width, height, table.title, SVG_STYLE, parts)


def _places(intervals: Sequence[tuple[int, int]], length: float, least: float) -> list[tuple[float, float]]:
    """Where intervals are drawn: each as long as it is, and none shorter than can be read."""
    whole = intervals[-1][1] - intervals[0][0]
    sizes = [max((stop - start) / whole * length, least) for start, stop in intervals]
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
