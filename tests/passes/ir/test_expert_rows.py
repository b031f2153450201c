"""How rows go to the ranks that store their experts: the order, the counts, and the rank that sent each row, against lists."""

from __future__ import annotations

import pytest
import torch

from passes.ir.comm.expert_rows import received_rows, route_rows, row_counts


def test_the_example_of_the_text() -> None:
    order, places, sent = route_rows(torch.tensor([3, 0, 1, 2, 1]), [2, 2])
    assert order.tolist() == [1, 2, 4, 0, 3]
    assert places.tolist() == [3, 0, 1, 4, 2]
    assert sent.tolist() == [3, 2]
    assert received_rows(torch.tensor([3, 4]), order).tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert row_counts(sent, order, (0, 1), "sent", sends=True) == (3, 2)


@pytest.mark.parametrize("owned", [[1, 1, 1], [3, 2, 2], [7]])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_each_row_goes_to_the_rank_of_its_expert_in_order(owned: list[int], rows: int) -> None:
    """Uneven parts, no rows, and experts counted from the end, as an index reads them."""
    group = torch.randint(-sum(owned), sum(owned), (rows,))
    rank_of = [rank for rank, count in enumerate(owned) for _ in range(count)]
    ranks = [rank_of[expert] for expert in group.tolist()]
    order, places, sent = route_rows(group, owned)
    assert order.tolist() == sorted(range(rows), key=lambda row: (ranks[row], row))
    assert sent.tolist() == [ranks.count(rank) for rank in range(len(owned))]
    x = torch.rand(rows, 2)
    assert torch.equal(x[order][places], x)


def test_a_row_of_an_expert_that_does_not_exist_goes_somewhere() -> None:
    *_, sent = route_rows(torch.tensor([4, 9, -5, 100]), [2, 2])
    assert int(sent.sum()) == 4


def test_a_rank_that_nobody_sends_to_has_no_rows() -> None:
    assert received_rows(torch.tensor([0, 0]), torch.empty(3)).shape == (0,)
