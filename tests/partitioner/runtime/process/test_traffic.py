"""Facts read from programs about messages hold in every run, in any order of the ranks."""

from __future__ import annotations

import inspect
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from partitioner.runtime.process.traffic import arrivals_shown, message_name, traffic_of
from passes.ir.comm.primitives import COLLECTIVES, halo_add, halo_exchange, receive, send, wait
from passes.ir.program import Program
from tests.support.models.zoo import case_named
from tests.support.running.programs import programs

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV", "DualPipeV")
QUICK = (("branches", "1F1B"), ("shared_layer", "DualPipeV"))


def step_programs(name: str, schedule: str, n_ranks: int, n_microbatches: int = 4) -> tuple[Program, ...]:
    return programs(case_named(name), schedule, n_ranks, n_microbatches)["train_step"]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(("branches", "shared_layer"), SCHEDULES)
    ],
)
def test_what_an_arrival_shows_is_true(name: str, schedule: str) -> None:
    ranks = step_programs(name, schedule, 3)
    shown = [arrivals_shown(ranks, rank) for rank in range(3)]
    claims = sum(len(tags) for peers in shown for tags in peers.values())
    assert claims > 0
    for seed in range(20):
        check_one_run(ranks, shown, random.Random(seed))


def check_one_run(ranks: tuple[Program, ...], shown: list[dict[int, dict[int, int]]], choice: random.Random) -> None:
    """Run the messages alone, a random rank at a time; whenever a message arrives, what it shows must have arrived before."""
    steps = [[node for node in program.module.graph.nodes if node.target in (send, wait)] for program in ranks]
    sent: set[tuple[int, int, int]] = set()
    arrived: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    while any(steps):
        able = [rank for rank in range(len(ranks)) if steps[rank] and can_go_on(rank, steps[rank][0], sent)]
        assert able
        rank = choice.choice(able)
        node = steps[rank].pop(0)
        if node.target is send:
            sent.add((rank, node.kwargs["destination"], node.kwargs["tag"]))
        elif node.args[0].target is receive:
            source, tag = node.args[0].kwargs["source"], node.args[0].kwargs["tag"]
            arrived[source, rank].add(tag)
            count = shown[rank].get(source, {}).get(tag, 0)
            assert arrived[rank, source] >= set(range(count))


def can_go_on(rank: int, node: fx.Node, sent: set[tuple[int, int, int]]) -> bool:
    pending = node.all_input_nodes[0]
    if node.target is send or pending.target is not receive:
        return True
    return (pending.kwargs["source"], rank, pending.kwargs["tag"]) in sent


def test_in_1f1b_a_gradient_shows_that_its_activation_has_arrived() -> None:
    ranks = step_programs("residual", "1F1B", 2)
    assert list(arrivals_shown(ranks, 0)[1].values()) == [1, 2, 3, 4]


@pytest.mark.slow
def test_equal_programs_have_equal_names_and_others_do_not() -> None:
    names = [traffic_of(step_programs("residual", *rest)).name for rest in (("1F1B", 2), ("1F1B", 2), ("GPipe", 2), ("1F1B", 3))]
    assert names[0] == names[1]
    assert len(set(names)) == 3


@pytest.mark.slow
def test_channels_and_groups() -> None:
    traffic = traffic_of(step_programs("gpt", "1F1B", 3))
    assert {(0, 1), (1, 0), (1, 2), (2, 1)} <= set(traffic.channels)
    assert traffic.groups == ((0, 2),)


@pytest.mark.parametrize("function", COLLECTIVES)
def test_groups_of_every_collective(function: Callable[..., Any]) -> None:
    """By keyword or in place; a group of one rank communicates nothing. A collective in another place is another program."""
    names = set()
    for group in ((1, 2), (0, 3), (2,)):
        graph = fx.Graph()
        more = ((0,),) * ([*inspect.signature(function).parameters].index("group") - 1)
        halo: dict[str, Any] = (
            {"owned": ((2,) * len(group),), "wanted": ("|".join(["0:2"] * len(group)),)} if function in (halo_exchange, halo_add) else {}
        )
        graph.call_function(function, ([graph.placeholder("x")], *more, group), halo)
        graph.call_function(function, ([], *more), {**halo, "group": (0, 1, 2, 3)})
        graph.output(None)
        traffic = traffic_of([Program("forward", 0, fx.GraphModule({}, graph), ())])
        assert traffic.groups == tuple(sorted(each for each in (group, (0, 1, 2, 3)) if len(each) > 1))
        names.add(traffic.name)
    assert len(names) == 3


def test_messages_have_the_names_of_their_values() -> None:
    ranks = step_programs("residual", "1F1B", 2)
    (first, *_) = [node for node in ranks[0].module.graph.nodes if node.target is send]
    assert message_name(ranks[0], "send", 1, 0) == first.args[0].name
    assert message_name(ranks[1], "receive", 0, 0).endswith("_mb0")
    assert message_name(ranks[1], "receive", 0, 99) == "message 99"
