"""Planned memory of ``pm(...)`` and ``backward()``, which run all forwards first, compared with such steps."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from partitioner.schedules.catalog import SCHEDULES, make_schedule
from partitioner.schedules.forwards_first import in_sweeps
from passes.ir.errors import ConfigError, PartitionWarning
from passes.ir.plan import Plan
from passes.ir.schedule import ActionKind
from tests.cost_models.simulator.test_simulated_memory import LENGTH, ROWS, gpt, measured
from tests.support.models.attention.gpt import VOCABULARY
from tests.support.running.slow_values import all_but

WIDTH = 64
TOLERANCE = 0.06


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, VOCABULARY))


CASES: Mapping[str, tuple[Callable[[], nn.Module], int, Any, dict[str, Any]]] = {
    "gpt, 1F1B": (gpt, 2, "pipeline", {"schedule": "1F1B", "n_microbatches": 8}),
    "gpt, 1F1B on four": (gpt, 4, "pipeline", {"schedule": "1F1B", "n_microbatches": 4}),
    "mlp, 1F1B": (mlp, 2, "pipeline", {"schedule": "1F1B", "n_microbatches": 8}),
    "gpt, interleaved": (gpt, 2, "pipeline", {"schedule": "Interleaved1F1B", "n_microbatches": 4}),
    "gpt, zero bubble": (gpt, 2, "pipeline", {"schedule": "ZB1P", "n_microbatches": 8}),
    "gpt, on a V": (gpt, 2, "pipeline", {"schedule": "ZBV", "n_microbatches": 4}),
    "gpt, GPipe": (gpt, 2, "pipeline", {"schedule": "GPipe", "n_microbatches": 4}),
    "gpt, all recomputed": (gpt, 2, "pipeline", {"schedule": "1F1B", "n_microbatches": 8, "recompute": "full"}),
    "pipeline and tensor": (gpt, 4, {"pipeline": 2, "tensor": 2}, {"schedule": "1F1B", "n_microbatches": 4}),
    "data and pipeline": (gpt, 4, {"data": 2, "pipeline": 2}, {"schedule": "1F1B", "n_microbatches": 4}),
    "data": (gpt, 2, "data", {}),
    "gathered parameters": (gpt, 2, "fsdp", {}),
}


def example(build: Callable[[], nn.Module]) -> tuple[Tensor, Tensor]:
    """Return inputs and target."""
    if build is gpt:
        return torch.randint(VOCABULARY, (ROWS, LENGTH)), torch.randint(VOCABULARY, (ROWS, LENGTH))
    return torch.randn(4 * ROWS, WIDTH), torch.randint(VOCABULARY, (4 * ROWS,))


def measured_call(pm: PartitionedModel, x: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return ``measured`` of a later call and its backward that start without gradients."""

    def step() -> None:
        output = pm(x)
        nn.functional.cross_entropy(output.flatten(0, -2), target.flatten()).backward()

    step()
    for parameter in pm.parameters():
        parameter.grad = None
    return measured(step, monkeypatch)


@pytest.mark.parametrize("name", all_but(["mlp, 1F1B"], CASES))
def test_the_planned_and_the_simulated_peak_are_those_of_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, devices, mode, options = CASES[name]
    x, target = example(build)
    pm = partition(build(), devices, mode, example_inputs=(x,), optimizer="adamw", progress=False, **options)
    found = measured_call(pm, x, target, monkeypatch)
    simulated = pm.simulate(step="forward_backward")
    for rank, memory in enumerate(simulated.memory):
        peak = found[rank] + memory.parameters + memory.optimizer
        assert pm.plan.call_memory[rank] == pytest.approx(peak, rel=TOLERANCE)
        assert memory.peak == pytest.approx(peak, rel=TOLERANCE)


def pipeline(**options: Any) -> PartitionedModel:
    x, _ = example(mlp)
    return partition(mlp(), 2, "pipeline", example_inputs=(x,), n_microbatches=8, progress=False, **options)


def test_where_a_schedule_is_not_kept_it_is_said() -> None:
    pm = pipeline(schedule="1F1B")
    assert min(call - step for call, step in zip(pm.plan.call_memory, pm.plan.memory, strict=True)) > 0
    assert any(note.startswith("pm(...) and backward() run all forwards first, and hold all 8 microbatches") for note in pm.plan.notes)
    assert "by pm(...) and backward(): all forwards come first" in pm.explain()
    assert "pm(...) and backward() run all forwards first: " in str(pm)
    assert Plan.from_json(pm.plan.to_json()).call_memory == pm.plan.call_memory
    for other in (pipeline(schedule="GPipe"), pipeline(schedule="1F1B", training=False)):
        assert not any("forwards first" in note for note in other.plan.notes)
        assert "forwards" not in str(other).partition("work and sends")[2].partition("Note")[2]


def test_a_limit_that_only_train_step_respects_is_said_when_the_model_is_partitioned() -> None:
    pm = pipeline(schedule="1F1B")
    limit = max(pm.plan.memory) + 1
    with pytest.warns(PartitionWarning, match=r"train_step\(\) fits into the memory limit, and pm\(...\) followed by"):
        pipeline(schedule="1F1B", memory_limit=limit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(schedule="1F1B", memory_limit=max(pm.plan.call_memory) + 1)


def test_a_simulated_call_runs_all_forwards_first() -> None:
    pm = pipeline(schedule="1F1B")
    by_schedule, call = pm.simulate(), pm.simulate(step="forward_backward")
    assert max(call.peak_memory) > max(by_schedule.peak_memory)
    actions = [each.section for each in call.timeline.computed if each.rank == 0 and each.section[1:2] in ("F", "B")]
    assert [section[1] for section in actions] == sorted((section[1] for section in actions), reverse=True)
    with pytest.raises(ConfigError, match="step must be 'train_step' or 'forward_backward'"):
        pm.simulate(step="forward")  # type: ignore[arg-type]


def test_sweeps_have_every_forward_and_one_backward_of_each() -> None:
    for name in SCHEDULES:
        schedule = in_sweeps(make_schedule(name, 2, 3))
        assert dataclasses.replace(schedule, actions=()) == dataclasses.replace(make_schedule(name, 2, 3), actions=())
        for actions in schedule.actions:
            forwards, backwards = actions[: len(actions) // 2], actions[len(actions) // 2 :]
            assert {action.kind for action in forwards} == {ActionKind.FORWARD}
            assert {action.kind for action in backwards} == {ActionKind.BACKWARD}
            assert sorted(action[:1] + action[2:] for action in forwards) == sorted(action[:1] + action[2:] for action in backwards)
