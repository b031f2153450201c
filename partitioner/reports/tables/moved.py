"""The bytes that move when one plan replaces another: by rank, and by tensor, the largest first.

data 2 x tensor 2  ->  tensor 2: 12.0 KiB move between ranks

rank     keeps  receives     sends
   0  12.0 KiB  4.00 KiB  6.00 KiB
"""

from __future__ import annotations

import re

from cost_models.hardware.units import format_bytes
from partitioner.reports.tables.table import align
from partitioner.runtime.state.resharding_moves import Move, Moves
from passes.ir.plan import Plan

__all__ = ["moved_text"]

_LONGEST = 12
"""Rows of the table of tensors; the rest is summed up."""


def moved_text(before: str, after: str, plan: Plan, moves: Moves) -> str:
    """Return tables by rank and by tensor of a change to ``plan``; both plans are given in words, too: ``"data 2 x tensor 2"``."""
    lost = moves.from_checkpoint
    loaded = f", {format_bytes(lost)} come from a checkpoint: no rank that is left has them" if lost else ""
    lines = [f"{before}  ->  {after}: {format_bytes(moves.between_ranks)} move between ranks{loaded}", ""]
    lines += [f"  {line}" for line in align(_rows_by_rank(plan, moves), ">>>>>" if lost else ">>>>")]
    if moves.moves:
        lines += ["", *(f"  {line}" for line in align(_rows_by_tensor(moves), "<>>>"))]
    lines += ["  bytes of parameters and buffers, and of what the optimizer keeps for them; a checkpoint serves both plans unchanged"]
    return "\n".join(lines)


def _rows_by_rank(plan: Plan, moves: Moves) -> list[tuple[str, ...]]:
    """Return the heading, a row for each rank of either plan, and the totals; the last column only if a checkpoint is read."""
    heading = ("rank", "keeps", "receives", "sends", "from a checkpoint")
    last = max([plan.n_ranks - 1, *(move.source for move in moves.moves if move.source is not None)])
    sizes = [
        (moves.kept[rank] if rank < plan.n_ranks else 0, moves.received(rank), moves.sent(rank), moves.loaded(rank))
        for rank in range(last + 1)
    ]
    totals = tuple(sum(column) for column in zip(*sizes, strict=True))
    rows = [(str(rank), *map(format_bytes, sizes_of_rank)) for rank, sizes_of_rank in enumerate(sizes)]
    columns = 5 if moves.from_checkpoint else 4
    return [row[:columns] for row in (heading, *rows, ("total", *map(format_bytes, totals)))]


def _rows_by_tensor(moves: Moves) -> list[tuple[str, ...]]:
    """Return the heading and rows of tensors, the largest first; the same tensor of all layers is one row: ``"blocks.*.up.weight"``."""
    groups: dict[str, list[Move]] = {}
    for move in moves.moves:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", move.name), []).append(move)
    sizes = {pattern: (sum(move.own for move in group), sum(move.state for move in group)) for pattern, group in groups.items()}
    order = sorted(sizes, key=lambda pattern: (-sum(sizes[pattern]), pattern))
    rows: list[tuple[str, ...]] = [("tensor", "", "own", "optimizer's")]
    for pattern in order[:_LONGEST]:
        names = {move.name for move in groups[pattern]}
        name, times = (pattern, f"x {len(names)}") if len(names) > 1 else (names.pop(), "")
        rows.append((name, times, *map(format_bytes, sizes[pattern])))
    rest = order[_LONGEST:]
    if rest:
        sums = (sum(column) for column in zip(*(sizes[pattern] for pattern in rest), strict=True))
        rows.append((f"{len(rest)} more", "", *map(format_bytes, sums)))
    return rows
