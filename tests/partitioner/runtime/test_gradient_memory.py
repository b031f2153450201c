"""Gradients of microbatches are added up where the first backward put them: never in memory of other values, and not twice in their own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from passes.ir.comm.microbatch import add_gradients, add_gradients_in_place
from tests.support.running.slow_values import slow

ROWS, WIDTH = 8, 4


class OneGradient(nn.Module):
    """Both weights have the same gradient: one value of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map any number of rows."""
        return torch.tanh(x @ (self.first + self.second))


class ExpandedGradient(nn.Module):
    """All elements of the weight's gradient are one number, which an expanded value has once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map any number of rows."""
        return torch.tanh(x * self.weight.sum())


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {"plain": plain, "one gradient": OneGradient, "expanded gradient": ExpandedGradient}


@pytest.mark.parametrize("mode", ["pipeline", *slow({"data": 2, "pipeline": 1}, {"fsdp": 2, "pipeline": 1})])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_microbatches_add_up(name: str, mode: str | dict[str, int]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x, target = torch.rand(2, ROWS, WIDTH, dtype=torch.float64)
    reference = copy.deepcopy(model)
    devices = 1 if mode == "pipeline" else 2
    pm = partition(model, devices, mode, example_inputs=(x,), n_microbatches=4, schedule="GPipe", progress=False)
    for _ in range(2):  # the second step adds to what the first one left
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        nn.functional.mse_loss(reference(x), target).backward()
    found = pm.full_gradients()
    for key, parameter in reference.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad)


def test_what_may_be_in_use_elsewhere_is_added_up_in_new_memory() -> None:
    gradients, more = ([torch.ones(2) * factor for _ in range(3)] for factor in (1.0, 2.0))
    kept = list(gradients)
    sums = add_gradients(gradients, more, (1,))
    assert [each.tolist() for each in sums] == [[3.0, 3.0]] * 3
    assert [each.tolist() for each in kept] == [[3.0, 3.0], [1.0, 1.0], [3.0, 3.0]]
    assert add_gradients_in_place(sums, more) is sums
    assert [each.tolist() for each in sums] == [[5.0, 5.0]] * 3


def test_a_step_of_microbatches_holds_gradients_twice_and_not_more() -> None:
    """The sums, and those of the microbatch that is at work."""
    x = torch.rand(ROWS, WIDTH)
    pm = partition(plain(), 1, "pipeline", example_inputs=(x,), n_microbatches=4, progress=False)
    of_parameters = sum(parameter.nbytes for parameter in pm.parameters())
    pm.train_step(x, target=torch.rand(ROWS, WIDTH), loss_fn=nn.functional.mse_loss)
    assert pm.simulate().memory[0].highest["gradients"][0] == 2 * of_parameters
