"""Traces of ``torch.profiler`` show actions and communication by the names that the schedule and the programs have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from partitioner import PartitionedModel
from passes.ir.comm.primitives import COLLECTIVES, receive, send
from passes.ir.errors import ConfigError
from passes.ir.torch_private import is_profiling
from tests.partitioner.runtime.profiler_cases import partitioned, profiled_names, step
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import slow


def actions(pm: PartitionedModel, rank: int) -> set[str]:
    """Return the actions of a rank, as its program has them."""
    sections = {str(node.meta.get("section")) for node in pm.graph(rank).graph.nodes}
    return {name for name in sections if name[:1].isdigit()}


def transfers(pm: PartitionedModel, rank: int) -> set[str]:
    """Return the names of a rank's sends, receives and reductions."""
    return {node.name for node in pm.graph(rank).graph.nodes if node.target in (send, receive, *COLLECTIVES)}


@pytest.mark.parametrize("mode", ["pipeline", *slow("fsdp", "tensor")])
def test_names(mode: str) -> None:
    pm, x = partitioned(mode)
    expected = step(pm, x)
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU]) as trace, pm.record() as run:
        step(pm, x)
    names = {event.name for event in trace.events() or ()}
    wanted = set().union(*(actions(pm, rank) | transfers(pm, rank) for rank in (0, 1)))
    assert actions(pm, 0)
    assert transfers(pm, 1)
    assert names >= wanted | {"train_step of rank 0", "train_step of rank 1"}
    waits = {name.removeprefix("wait for ") for name in names if name.startswith("wait for ")}
    assert waits
    assert waits <= wanted
    assert {each.section for each in run.timeline.computed} & actions(pm, 0)  # both record at once
    if mode == "pipeline":
        assert actions(pm, 0) >= {"0F0", "0F1"}
        assert {each for each in names if each.startswith("1") and each[1:2] in "FB"} == actions(pm, 1)
    assert torch.isfinite(expected)


@pytest.mark.slow
def test_ranges_are_nested() -> None:
    """Also where a stage waits for the random numbers of the one before it."""
    own = {"train_step of rank 0", "train_step of rank 1"}
    for mode in ("pipeline", "fsdp"):
        pm, x = partitioned(mode)
        own |= set().union(*(actions(pm, rank) | transfers(pm, rank) for rank in (0, 1)))
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step(pm, x)
        spans = [(each.time_range.start, each.time_range.end) for each in trace.events() or () if each.name in own]
        assert all(
            start_of_one >= end_of_other or start_of_other >= end_of_one or (start_of_one <= start_of_other) == (end_of_one >= end_of_other)
            for (start_of_one, end_of_one), (start_of_other, end_of_other) in itertools.combinations(spans, 2)
        )


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> NoReturn:
        raise AssertionError(name)

    monkeypatch.setattr("partitioner.runtime.recording.recorder.record_function", refuse)
    pm, x = partitioned("pipeline")
    step(pm, x)
    with pytest.raises(AssertionError, match="train_step of rank"), profile(activities=[ProfilerActivity.CPU]):
        step(pm, x)
    step(pm, x)


def test_a_step_that_fails_ends_its_ranges() -> None:
    pm, x = partitioned("pipeline")
    step(pm, x)

    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if is_profiling():
            raise ZeroDivisionError
        return (output - target).square().mean()

    pm.train_step(x, target=x, loss_fn=fail)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        with pytest.raises(ConfigError, match="loss_fn fails"):
            pm.train_step(x, target=x, loss_fn=fail)
        with torch.profiler.record_function("after"):
            pass
    events = {event.name: event for event in trace.events() or ()}
    assert events["after"].cpu_parent is None
    assert events["after"].time_range.start >= events["train_step of rank 1"].time_range.end


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_processes(workers: Callable[[int], Workers]) -> None:
    pm, _ = partitioned("pipeline")
    for rank, names in enumerate(workers(2).values(profiled_names, "pipeline", timeout=120)):
        assert names >= actions(pm, rank) | transfers(pm, rank) | {f"train_step of rank {rank}"}
        assert not names & actions(pm, 1 - rank)
