"""A plan is for one model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partitioner import partition
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
