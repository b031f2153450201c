"""Operations that make tensors from sizes, and those that look rows up."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.analysis.batch.call import Call
from passes.analysis.batch.role import Role, RowNumbers, Rows, Same

__all__ = ["arange", "created", "gather", "index", "scatter"]


def created(call: Call) -> Role:
    """Filled with one value, or drawn: rows where a size is a multiple of the batch size. Values of operands are not read."""
    fill = call.get("fill_value")
    if call.depends_on_batch(fill) or (isinstance(fill, fx.Node) and not isinstance(call.role(fill), Same)):
        return call.mixed
    shape = call.results[0]
    found = [dimension for dimension, size in enumerate(shape) if call.depends_on_batch(size)]
    if not found:
        return Same()
    model = call.get("self")
    if isinstance(model, fx.Node) and isinstance(call.role(model), Rows) and call.shapes[model] == shape:
        return call.role(model)
    return Rows(found[0]) if len(found) == 1 else call.mixed


def arange(call: Call) -> Role:
    """The numbers of the rows, or numbers that every microbatch has."""
    start, end, step = call.get("start") or 0, call["end"], call.get("step")
    if not call.depends_on_batch([start, end, step]):
        return Same()
    return RowNumbers(0) if start == 0 and end == call.batch and step in (None, 1) else call.mixed


def gather(call: Call) -> Role:
    """Picks along one dimension, each row among its own."""
    source, index = call["self"], call.get("index") or call["indices"]
    if call["dim"] is None:  # take_along_dim of the flattened operand
        return call.mixed
    dimension = call.dimension(source, call["dim"])
    return call.aligned({part: [None if d == dimension else d for d in range(call.rank(part))] for part in (source, index)})


def scatter(call: Call) -> Role:
    """Writes along one dimension, each row into itself."""
    dimension = call.dimension(call["self"], call["dim"])
    rank = call.rank(call["self"])
    if any(call.rank(part) != rank for part in call.operands):
        return call.mixed
    return call.aligned({part: [None if d == dimension else d for d in range(rank)] for part in call.operands})


def index(call: Call) -> Role:
    """Advanced indexing: tables looked up by rows, rows picked by row numbers, other dimensions picked by what every microbatch has."""
    source = call["self"]
    indices: list[Any] = list(call["indices"])
    indices += [None] * (call.rank(source) - len(indices))
    picks = [(dimension, pick) for dimension, pick in enumerate(indices) if pick is not None]
    if any(pick.meta["val"].dtype in (torch.bool, torch.uint8) for _, pick in picks) or call.rank(source) != len(indices):
        return call.mixed
    broadcast_rank = max(call.rank(pick) for _, pick in picks)
    adjacent = picks[-1][0] - picks[0][0] == len(picks) - 1
    start = picks[0][0] if adjacent else 0
    rows: set[Role] = set()
    aligned_by_number: set[int] = set()
    for dimension, pick in picks:
        role = call.role(pick)
        if isinstance(role, Same):
            continue
        if not isinstance(role, Rows | RowNumbers):
            return call.mixed
        target = start + broadcast_rank - call.rank(pick) + role.dimension
        rows.add(Rows(target, role.before if isinstance(role, Rows) else 1))
        if isinstance(role, RowNumbers):
            aligned_by_number.add(dimension)
    return _indexed(call, rows, aligned_by_number, picks, (start, broadcast_rank, adjacent))


def _indexed(
    call: Call, rows: set[Role], aligned_by_number: set[int], picks: list[tuple[int, fx.Node]], place: tuple[int, int, bool]
) -> Role:
    role = call.role(call["self"])
    start, broadcast_rank, _ = place
    picked = {dimension for dimension, _ in picks}
    if isinstance(role, Rows):
        if role.dimension in picked:
            if aligned_by_number != {role.dimension} or role.before != 1:
                return call.mixed
        else:
            kept_before = sum(dimension < role.dimension and dimension not in picked for dimension in range(role.dimension))
            rows.add(Rows(kept_before + (broadcast_rank if start <= kept_before else 0), role.before))
            if aligned_by_number:
                return call.mixed
    elif not isinstance(role, Same) or aligned_by_number:
        return call.mixed
    if not rows:
        return Same()
    return rows.pop() if len(rows) == 1 else call.mixed
