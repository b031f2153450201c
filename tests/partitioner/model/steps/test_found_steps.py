"""Steps that differ in what a key does not show, or in one thing of it: each gives the loss and gradients of the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from passes.emit.programs import LossReduction
from tests.support.running.slow_values import slow

cross_entropy, mse = nn.functional.cross_entropy, nn.functional.mse_loss


def weighted(weights: list[float]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss by class weights, which are tensors that the key of a loss does not compare."""
    by_class = torch.tensor(weights)
    return lambda output, target: cross_entropy(output, target, by_class)


def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: factor * mse(output, target)


CLASSES, OTHERS, IGNORED = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 2, 1, 1]), torch.tensor([0, -100, 2, -100])
VALUES = torch.rand(4, 3)

STEPS: dict[str, list[tuple[Any, Any, LossReduction]]] = {
    "targets that count": [(CLASSES, cross_entropy, "mean"), (IGNORED, cross_entropy, "mean"), (OTHERS, cross_entropy, "mean")],
    "weights": [(CLASSES, weighted([1.0, 2.0, 3.0]), "mean"), (CLASSES, weighted([3.0, 1.0, 1.0]), "mean")],
    "captured numbers": [(VALUES, scaled(1.0), "mean"), (VALUES, scaled(2.0), "mean"), (VALUES, scaled(1.0), "mean")],
    "kinds of targets": [(CLASSES, cross_entropy, "mean"), (VALUES, cross_entropy, "mean"), (VALUES, mse, "mean")],
    "reductions": [(VALUES, mse, "mean"), (VALUES, lambda a, b: mse(a, b).sqrt(), "batch"), (VALUES, mse, "batch")],
    "in a dict": [({"a": VALUES}, lambda out, t: mse(out, t["a"]), "mean"), ({"a": VALUES + 1}, lambda out, t: mse(out, t["a"]), "mean")],
}


@pytest.mark.parametrize("mode", ["pipeline", "data", *slow("tensor")])
@pytest.mark.parametrize("name", STEPS)
def test_each_step_is_that_of_the_model(name: str, mode: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.rand(4, 5)
    pm = partition(model, devices=2, mode=mode, example_inputs=(x,), progress=False)
    for target, loss_fn, reduction in (*STEPS[name], *STEPS[name]):
        pm.zero_grad()
        model.zero_grad()
        expected = loss_fn(model(x), target)
        expected.backward()
        torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=loss_fn, loss_reduction=reduction), expected.detach())
        torch.testing.assert_close(pm.full_gradients(), {key: each.grad for key, each in model.named_parameters()})


def test_a_parameter_that_is_unfrozen_later_gets_its_gradient() -> None:
    model, x, target = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), torch.rand(4, 5), torch.rand(4, 3)
    model[0].requires_grad_(requires_grad=False)
    pm = partition(model, devices=2, mode="data", example_inputs=(x,), progress=False)
    for is_trained in (False, True, False):
        for name, parameter in pm.named_parameters():
            if name.startswith("0."):
                parameter.requires_grad_(is_trained)
        pm.zero_grad()
        pm.train_step(x, target=target, loss_fn=mse)
        assert (pm.full_gradients()["0.weight"] is not None) == is_trained
