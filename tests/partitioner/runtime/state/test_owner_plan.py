"""Owners are balanced, and the messages of a step are as few as the blocks allow."""

from __future__ import annotations

import random

import pytest
import torch

from partitioner.runtime.state.optimizers.owner_plan import Sharded, choose_owners, update_cost
from passes.spmd.shards import Block, whole_block


def rows(count: int, width: int, first: int, last: int) -> Block:
    return Block((count, width), (count, width), (((first, last),), ((0, width),)), (last - first, width))


def matrix(name: str, count: int, width: int, ranks: tuple[int, ...], *, copies: int = 1) -> Sharded:
    """Return rows over ranks; each part ``copies`` times."""
    n_parts = len(ranks) // copies
    bounds = [count * part // n_parts for part in range(n_parts + 1)]
    holders = {rank: rows(count, width, bounds[index // copies], bounds[index // copies + 1]) for index, rank in enumerate(ranks)}
    return Sharded(name, torch.float32, holders, update_cost((count, width), linear=False))


def test_the_bytes_of_equal_shards_follow_a_formula() -> None:
    """Of n equal parts, n - 1 travel three times: gradient, value, update."""
    for n_ranks in (2, 4, 8):
        parameters = [matrix(str(number), 16, 8 * (number + 1), tuple(range(n_ranks))) for number in range(5)]
        plan = choose_owners(parameters, None, n_ranks)
        size = sum(parameter.n_bytes for parameter in parameters)
        assert plan.total_bytes == 3 * size * (n_ranks - 1) // n_ranks
        assert sum(map(plan.sent, range(n_ranks))) == sum(map(plan.received, range(n_ranks))) == plan.total_bytes


def test_replicas_send_once_and_receive_each() -> None:
    """Two parts, each on two ranks: one rank sends the other part to the owner, and three ranks get new values."""
    plan = choose_owners([matrix("weight", 8, 4, (0, 1, 2, 3), copies=2)], None, 4)
    half = 8 * 4 * 4 // 2
    assert plan.owners == {"weight": 0}
    assert sorted((each.what, each.source, each.destination, each.n_bytes) for each in plan.messages) == [
        ("gradient", 2, 0, half),
        ("update", 0, 1, half),
        ("update", 0, 2, half),
        ("update", 0, 3, half),
        ("value", 2, 0, half),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_work_is_balanced(seed: int) -> None:
    """No rank has more than the mean and one parameter, the bound of assigning each to the least busy."""
    draw = random.Random(seed)
    parameters = [matrix(str(number), draw.choice((8, 16, 64)), draw.choice((4, 32)), (0, 1, 2, 3)) for number in range(12)]
    plan = choose_owners(parameters, None, 4)
    costs = [plan.cost(rank) for rank in range(4)]
    assert max(costs) <= sum(costs) / 4 + max(parameter.cost for parameter in parameters)
    assert sum(costs) == sum(parameter.cost for parameter in parameters)
    assert plan.imbalance == max(costs) * 4 / sum(costs)


def test_stages_keep_their_parameters_and_old_owners_stay() -> None:
    first = choose_owners([matrix("a", 8, 8, (0, 1)), matrix("b", 8, 8, (2, 3))], None, 4)
    assert first.owners == {"a": 0, "b": 2}
    plan = choose_owners([matrix("c", 8, 8, (0, 1))], first, 4)
    assert plan.owners == {"a": 0, "b": 2, "c": 1}
    assert plan.restricted_to(["c"]).owners == {"c": 1}
    assert plan.restricted_to(["c"]).flag_bytes == plan.flag_bytes == 6


def test_an_owner_that_has_the_whole_gathers_nothing() -> None:
    whole = whole_block((4, 4))
    plan = choose_owners([Sharded("weight", torch.float64, {0: whole, 1: rows(4, 4, 0, 2), 2: rows(4, 4, 2, 4)}, 1.0)], None, 3)
    assert [(each.what, each.destination) for each in plan.messages] == [("update", 1), ("update", 2)]


def test_the_cost_of_an_update() -> None:
    assert update_cost((16, 4), linear=False) == update_cost((4, 16), linear=False) == 16 * 4 * 4
    assert update_cost((16, 4), linear=True) == 64
    assert update_cost((8, 2, 3, 3), linear=False) == 144 * 8
    assert update_cost((7,), linear=False) == 7
    assert update_cost((0, 3), linear=False) == 0
