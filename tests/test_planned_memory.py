"""What a plan says that ranks hold beside what a step holds: measured where it runs in this process, simulated where it is too large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from partitioner import InfeasiblePlanError, partition
from tests.models.gpt import VOCABULARY
from tests.test_planned_times import SETTINGS, on_a100s
from tests.test_simulated_memory import LENGTH, ROWS, gpt, measured_step

BELOW, ABOVE = 0.02, 0.06
"""How far a prediction may be below what is measured, and above it."""

AHEAD = 0.25
"""The same where weights are gathered for each microbatch: this process makes room for them when they are waited for, devices before."""

CASES: Mapping[str, tuple[int, Any, dict[str, Any]]] = {
    "one device": (1, "model", {}),
    "one device, SGD": (1, "model", {"optimizer": "sgd"}),
    "one device, all recomputed": (1, "model", {"recompute": "full"}),
    "one device, microbatches": (1, "pipeline", {"n_microbatches": 4}),
    "data": (2, "data", {}),
    "data, all recomputed": (2, "data", {"recompute": "full"}),
    "data, microbatches": (2, "data", {"n_microbatches": 4}),
    "data, bfloat16 and float32": (2, "data", {"precision": "bf16-mixed"}),
    "data, bfloat16": (2, "data", {"precision": "bf16-true"}),
    "gathered parameters": (2, "fsdp", {}),
    "gathered parameters, four ranks": (4, "fsdp", {}),
    "gathered parameters, all recomputed": (2, "fsdp", {"recompute": "full"}),
    "gathered parameters, bfloat16 and float32": (2, "fsdp", {"precision": "bf16-mixed"}),
    "cut state": (2, "zero1", {}),
    "tensor": (2, "tensor", {}),
    "GPipe": (2, "pipeline", {"schedule": "GPipe", "n_microbatches": 8}),
    "GPipe, all recomputed": (2, "pipeline", {"schedule": "GPipe", "n_microbatches": 8, "recompute": "full"}),
    "1F1B": (2, "pipeline", {"schedule": "1F1B", "n_microbatches": 8}),
    "1F1B, some recomputed": (2, "pipeline", {"schedule": "1F1B", "n_microbatches": 8, "recompute": "selective"}),
    "1F1B, bfloat16 and float32": (2, "pipeline", {"schedule": "1F1B", "n_microbatches": 4, "precision": "bf16-mixed"}),
    "zero bubble": (2, "pipeline", {"schedule": "ZB1P", "n_microbatches": 8}),
    "interleaved": (2, "pipeline", {"schedule": "Interleaved1F1B", "n_microbatches": 8}),
    "on a V": (2, "pipeline", {"schedule": "ZBV", "n_microbatches": 8}),
    "pipeline and tensor": (4, {"pipeline": 2, "tensor": 2}, {"schedule": "1F1B", "n_microbatches": 4}),
    "pipeline and gathered parameters": (4, {"pipeline": 2, "fsdp": 2}, {"schedule": "1F1B", "n_microbatches": 4}),
}
FAST = ("one device", "data", "gathered parameters", "1F1B", "tensor")


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_a_plan_holds_what_a_run_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, mode, options = CASES[name]
    x, target = (torch.randint(VOCABULARY, (ROWS, LENGTH)) for _ in range(2))
    pm = partition(gpt(), devices, mode, example_inputs=(x,), progress=False, **{"optimizer": "adamw", **options})
    found = measured_step(pm, x, target, monkeypatch)
    for rank, there in enumerate(pm.simulate().memory):
        peak = found[rank] + there.parameters + there.optimizer
        above = AHEAD if name == "pipeline and gathered parameters" else ABOVE
        assert (1 - BELOW) * peak <= pm.plan.memory[rank] <= (1 + above) * peak


LARGE: Mapping[str, tuple[Any, int, Mapping[str, Any]]] = {
    **SETTINGS,
    "data, microbatches": ("data", 2, {"n_microbatches": 4}),
    "gathered parameters, microbatches": ("fsdp", 4, {"n_microbatches": 4}),
    "gathered parameters, all recomputed": ("fsdp", 4, {"recompute": "full"}),
    "gathered parameters, some recomputed": ("fsdp", 4, {"recompute": "selective"}),
    "pipeline and gathered parameters": ({"pipeline": 2, "fsdp": 2}, 4, {"schedule": "1F1B", "n_microbatches": 4}),
    "tensor, some recomputed": ("tensor", 4, {"recompute": "selective"}),
    "on a V": ("pipeline", 2, {"schedule": "ZBV", "n_microbatches": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_plan_holds_what_the_simulation_of_its_programs_holds(name: str) -> None:
    """Of weights and messages so large that they are gathered, and summed, one by one."""
    pm = on_a100s(LARGE[name])
    for planned, simulated in zip(pm.plan.memory, pm.simulate().peak_memory, strict=True):
        assert 0.98 * simulated <= planned <= 1.1 * simulated


@pytest.mark.parametrize("mode", ["fsdp", "auto"])
def test_a_limit_is_of_all_that_is_held(mode: str) -> None:
    """A plan at its own limit is found again; a byte less, and there is another one, or none."""
    x = torch.randint(VOCABULARY, (ROWS, LENGTH))
    options: dict[str, Any] = {"example_inputs": (x,), "progress": False, "recompute": "none", "n_microbatches": 1}
    free = partition(gpt(), 2, mode, **options).plan
    limit = max(free.memory)
    assert partition(gpt(), 2, mode, memory_limit=limit, **options).plan.step_time == free.step_time
    try:
        less = partition(gpt(), 2, mode, memory_limit=limit - 1, **options).plan
    except InfeasiblePlanError:
        return
    assert max(less.memory) < limit
    assert less.step_time > free.step_time
