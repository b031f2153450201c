"""Warnings name the call of the user, or of the framework that calls the model for the user."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition

FRAMEWORK = """
def compute_loss(module, x):
    return module(x).sum()
"""


@pytest.fixture
def pm() -> PartitionedModel:
    return partition(nn.Linear(4, 2), 2, "data", example_inputs=(torch.randn(4, 4),), progress=False)


@pytest.fixture
def framework() -> types.ModuleType:
    """Return a module that calls models, in a file of its own."""
    module = types.ModuleType("framework.trainer")
    exec(compile(FRAMEWORK, "framework/trainer.py", "exec"), vars(module))  # noqa: S102  the text above
    return module


def place_of(call: Callable[[], Tensor]) -> tuple[str, int]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    (one,) = (each for each in said if "does not divide over 2 ranks" in str(each.message))
    return one.filename, one.lineno


def test_calls_of_the_user(pm: PartitionedModel) -> None:
    x = torch.randn(3, 4)
    inside = nn.Sequential(pm, nn.ReLU())
    calls: list[Callable[[], Tensor]] = [
        lambda: pm(x),
        lambda: pm.train_step(x, target=x[:, :2], loss_fn=nn.functional.mse_loss),
        lambda: inside(torch.randn(7, 4)),  # a call of the first kind again would not warn
    ]
    for call in calls:
        assert place_of(call) == (__file__, call.__code__.co_firstlineno)


def test_a_call_of_a_framework(pm: PartitionedModel, framework: types.ModuleType) -> None:
    assert place_of(lambda: framework.compute_loss(pm, torch.randn(5, 4))) == ("framework/trainer.py", 3)
