"""What moves when a plan takes the place of another: a line a rank, and the tensors that move most.

data 2 x tensor 2  ->  tensor 2: 12.0 KiB move between ranks

rank     keeps  receives     sends
   0  12.0 KiB  4.00 KiB  6.00 KiB
"""

from __future__ import annotations

import re

from cost_models.hardware.units import format_bytes
from partitioner.reports.tables.table import align
from partitioner.runtime.state.resharding_moves import Moves
from passes.ir.plan import Plan

__all__ = ["moved_text"]


def moved_text(before: str, after: str, plan: Plan, moves: Moves) -> str:
    """Tell what moves between two plans, given in words: by rank of the new plan, and by tensor."""
    lost = moves.from_checkpoint
    loaded = f", {format_bytes(lost)} come from a checkpoint: no rank that is left has them" if lost else ""
    lines = [f"{before}  ->  {after}: {format_bytes(moves.between_ranks)} move between ranks{loaded}", ""]
    lines += [f"  {line}" for line in align(_ranks(plan, moves), ">>>>>" if lost else ">>>>")]
    if moves.moves:
        lines += ["", *(f"  {line}" for line in align(_tensors(moves), "<>>>"))]
    lines += ["  bytes of parameters and buffers, and of what the optimizer keeps for them; a checkpoint serves both plans as it is"]
    return "\n".join(lines)


def _ranks(plan: Plan, moves: Moves) -> list[tuple[str, ...]]:
    """A line for each rank of either plan, and the totals."""
    heading = ("rank", "keeps", "receives", "sends", "from a checkpoint")
    last = max([plan.n_ranks - 1, *(move.source for move in moves.moves if move.source is not None)])
    numbers = [
        (moves.kept[rank] if rank < plan.n_ranks else 0, moves.received(rank), moves.sent(rank), moves.loaded(rank))
        for rank in range(last + 1)
    ]
    total = tuple(sum(column) for column in zip(*numbers, strict=True))
    shown = [(str(rank), *map(format_bytes, each)) for rank, each in enumerate(numbers)] + [("total", *map(format_bytes, total))]
    columns = 5 if moves.from_checkpoint else 4
    return [row[:columns] for row in (heading, *shown)]


def _tensors(moves: Moves) -> list[tuple[str, ...]]:
    """Those of equal layers in one line, what moves most first."""
    own: dict[str, int] = {}
    state: dict[str, int] = {}
    members: dict[str, set[str]] = {}
    for move in moves.moves:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", move.name)
        own[pattern] = own.get(pattern, 0) + move.own
        state[pattern] = state.get(pattern, 0) + move.state
        members.setdefault(pattern, set()).add(move.name)
    order = sorted(own, key=lambda pattern: (-own[pattern] - state[pattern], pattern))
    rows: list[tuple[str, ...]] = [("tensor", "", "own", "optimizer's")]
    for pattern in order[:_MOST]:
        several = len(members[pattern]) > 1
        name = pattern if several else next(iter(members[pattern]))
        rows.append((name, f"x {len(members[pattern])}" if several else "", format_bytes(own[pattern]), format_bytes(state[pattern])))
    rest = order[_MOST:]
    if rest:
        sums = (sum(moved[each] for each in rest) for moved in (own, state))
        rows.append((f"{len(rest)} more", "", *map(format_bytes, sums)))
    return rows


_MOST = 12
"""Lines of tensors."""
