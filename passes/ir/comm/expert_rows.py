"""Rows that go to the ranks that store their experts: in which order, how many to each rank, and how many come.

Experts 0 and 1 are stored by rank 0, 2 and 3 by rank 1; on rank 0:

    group              3  0  1  2  1        the expert of each row
    order              1  2  4  0  3        rows of the first rank's experts, then those of the second's
    places             3  0  1  4  2        where each row is in that order
    sent               3  2                 how many rows go to each rank
    received           3  4                 how many each rank sends, by an all_to_all of ``sent``
    sources            0  0  0  1  1  1  1  the rank that sent each received row

How many rows come is known when a program runs. Its graph has a symbol for that (``passes.ir.tensor_spec.RowCount``), the size of
``sources`` and of all that is computed of received rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from passes.ir.tensor_spec import row_count
from passes.ir.torch_private import open_size

torch.library.define("partitioner::route_rows", "(Tensor group, int[] owned) -> (Tensor order, Tensor places, Tensor sent)")
torch.library.define("partitioner::received_rows", "(Tensor received, Tensor like) -> Tensor")

route_rows = torch.ops.partitioner.route_rows.default
"""The order of rows by the rank that stores their expert, the place of each row in it, and how many go to each rank.

``owned``: how many experts each rank stores, one rank after another. A row of a negative expert goes where one counted from the end is
stored, as an index reads it; rows of experts that do not exist go to any rank: a product has zeros for them.
"""

received_rows = torch.ops.partitioner.received_rows.default
"""The rank that sent each row, for the counts of all ranks: (rows that were received,). ``like`` has as many rows as are expected."""


def _route_rows(group: Tensor, owned: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    ends = torch.tensor(owned, device=group.device).cumsum(0)
    rank = torch.searchsorted(ends, group.remainder(sum(owned)), right=True)
    order = rank.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return order, places, torch.bincount(rank, minlength=len(owned))


def _received_rows(received: Tensor, like: Tensor) -> Tensor:  # noqa: ARG001  for its size in a trace
    return torch.repeat_interleave(received)


def _fake_route_rows(group: Tensor, owned: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    numbers = (group.new_empty(size, dtype=torch.int64) for size in (group.shape[0], group.shape[0], len(owned)))
    order, places, sent = numbers
    return order, places, sent


def _fake_received_rows(received: Tensor, like: Tensor) -> Tensor:
    rows: int | torch.SymInt = like.shape[0]
    expected = rows if isinstance(rows, int) else rows.node.expr
    return received.new_empty(open_size(row_count(expected), received))


for _operator, _run, _fake in ((route_rows, _route_rows, _fake_route_rows), (received_rows, _received_rows, _fake_received_rows)):
    torch.library.impl(_operator.name(), "CompositeExplicitAutograd", _run)
    torch.library.register_fake(_operator.name(), _fake)


def row_counts(counts: Tensor, rows: Tensor, group: tuple[int, ...], route: str, *, sends: bool) -> tuple[int, ...]:  # noqa: ARG001
    """Return how many rows go to each rank of a group, or come from it, as numbers.

    Args:
        counts: as a tensor.
        rows: a tensor with all of these rows.
        group: the ranks.
        route: the same text for what one rank sends and the other one receives, by which a proof pairs them.
        sends: whether rows go.
    """
    return tuple(counts.tolist())
