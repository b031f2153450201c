"""A plan is for one model, and decides all that options of planning say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partitioner import Constraints, PartitionedModel, partition
from passes.ir.errors import ConfigError
from passes.ir.plan import Plan


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 4))


@pytest.mark.parametrize("mode", ["pipeline", "tensor", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_plan_for_another_model_is_refused(mode: str) -> None:
    """Nodes have the same names in both."""
    x = torch.randn(4, 8)
    plan = Plan.from_json(partition(perceptron(16), 2, mode, example_inputs=(x,), progress=False).plan.to_json())
    with pytest.raises(ConfigError, match="the plan was made for another model"):
        partition(perceptron(32), 2, plan=plan, example_inputs=(x,), progress=False)


@pytest.mark.parametrize("mode", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_plan_for_training_fits_in_evaluation(mode: str) -> None:
    """There are fewer nodes: it fits where no stage begins with a dropout."""
    x = torch.randn(4, 8)
    plan = partition(perceptron(16), 2, mode, example_inputs=(x,), progress=False).plan
    model = perceptron(16).eval()
    pm = partition(model, 2, plan=plan, example_inputs=(x,), progress=False)
    torch.testing.assert_close(pm(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_the_sum_of_losses_counts_its_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, dtype=dtype)
    pm = partition(perceptron(16).to(dtype), 2, "data", example_inputs=(x,), progress=False)
    pm.train_step(x, target=torch.zeros(4, 4, dtype=dtype), loss_fn=nn.functional.mse_loss)
    (node,) = [node for node in pm.graph(0).graph.nodes if node.name == "all_reduce_loss"]
    assert node.meta["bytes"] == dtype.itemsize


PLAN: dict[str, Any] = {"mode": {"pipeline": 2}, "n_microbatches": 2, "schedule": "1F1B", "stages_per_device": 1, "recompute": "none"}


def with_plan(**options: Any) -> PartitionedModel:
    x = torch.randn(4, 8)
    plan = partition(perceptron(16), 2, example_inputs=(x,), progress=False, **PLAN).plan
    return partition(perceptron(16), 2, example_inputs=(x,), progress=False, plan=plan, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", {"tensor": 2}),
        ("mode", "data"),
        ("mode", {"pipeline": 4}),
        ("mode", {"pipeline": (1, 2)}),
        ("n_microbatches", 4),
        ("schedule", "GPipe"),
        ("stages_per_device", 2),
        ("recompute", "full"),
        ("recompute", {"0": "full"}),
        ("memory_limit", 1),
        ("batchnorm", "local"),
        ("reduce_dtype", torch.bfloat16),
        ("constraints", Constraints(axes={"ffn": "tensor"})),
        ("objective", "memory"),
        ("time_limit", 10),
    ],
)
def test_options_that_differ_from_the_plan_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"plan= gives a whole plan, which differs from {name}=") as caught:
        with_plan(**{name: value})
    assert f"leave out {name}=; or leave out plan=" in str(caught.value)


def test_all_differing_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"differs from mode='data', n_microbatches=4\n"):
        with_plan(**{**PLAN, "mode": "data", "n_microbatches": 4})


def test_options_that_the_plan_has_pass() -> None:
    beside = {"cluster": "h100:1x2", "optimizer": "sgd", "training": True, "inputs": "local", "memory_limit": "1GiB", "batchnorm": "sync"}
    assert with_plan(**PLAN, **beside, constraints=Constraints()).plan.n_microbatches == 2
    assert with_plan(mode="pipeline").plan.schedule == "1F1B"


@pytest.mark.parametrize(
    ("devices", "mode", "other"),
    [
        (1, {"tile": 4}, {"tile": (3, 2)}),
        (1, {"tile": (2, 2)}, {"tile": 2}),
        (4, "tile", {"tile": (4, 1)}),
        (3, {"pipeline": (2, 1)}, {"pipeline": 3}),
        (3, {"pipeline": 2, "tensor": (2, 1)}, {"pipeline": (2, 1)}),
        (4, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}),
        (1, "data", {"tile": 2}),
    ],
    ids=str,
)
def test_the_mode_of_a_plan(devices: int, mode: Any, other: Any) -> None:
    x = torch.randn(8, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    plan = partition(model, devices, mode, example_inputs=(x,), progress=False).plan
    assert partition(model, devices, mode, example_inputs=(x,), progress=False, plan=plan).plan == plan
    with pytest.raises(ConfigError, match="differs from mode="):
        partition(model, devices, other, example_inputs=(x,), progress=False, plan=plan)
