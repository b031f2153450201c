"""A model that is traced in evaluation mode is planned for what runs: its forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partitioner import partition
from tests.support.models.attention.gpt import Gpt

TOLERANCE = 0.15
"""Of seconds: a plan does not count that every stage receives the results."""


@pytest.mark.parametrize(
    ("mode", "fixed"),
    [
        pytest.param("tensor", {}, marks=pytest.mark.slow, id="tensor"),
        pytest.param("pipeline", {}, marks=pytest.mark.slow, id="pipeline"),
        pytest.param("data", {"recompute": "full"}, id="data"),
    ],
)
def test_a_plan_in_evaluation_is_of_the_forward(mode: str, fixed: dict[str, Any]) -> None:
    """The same seconds and bytes as the simulation of its programs, which have no backward, no gradients and no optimizer."""
    model = Gpt(width=384, heads=6, depth=1).eval()
    pm = partition(model, 2, mode, example_inputs=(torch.zeros(64, 6, dtype=torch.long),), cluster="cpu:1x2", progress=False, **fixed)
    simulated = pm.simulate()
    assert all(memory.gradients == memory.optimizer == 0 for memory in simulated.memory)
    assert pm.plan.step_time == pytest.approx(simulated.step_time, rel=TOLERANCE)
    for planned, held in zip(pm.plan.memory, simulated.peak_memory, strict=True):
        assert 0.9 * held <= planned <= 1.5 * held


def test_in_training_the_backward_is_planned() -> None:
    model, rows = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), torch.zeros(256, 512)
    trained, evaluated = (
        partition(model, 2, "data", example_inputs=(rows,), training=training, cluster="h100:1x2", progress=False).plan
        for training in (True, False)
    )
    assert trained.step_time > 2 * evaluated.step_time
    assert trained.memory[0] > 3 * evaluated.memory[0]
