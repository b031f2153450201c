"""Tensors that take the place of a model's own are refused, and so are transforms of functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from partitioner import ConfigError, partition


def test_calls_with_other_tensors_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), torch.randn(4, 6)
    pm = partition(model, 2, "data", example_inputs=(x,), progress=False)
    for values in ({"0.bias": torch.rand(8)}, {"1.running_mean": torch.rand(8)}):
        with pytest.raises(ConfigError, match=r"was replaced, as torch\.func\.functional_call does"):
            functional_call(pm, values, (x,))
    torch.testing.assert_close(pm(x), model(x))


def test_transforms_of_functions_are_refused() -> None:
    model, x = nn.Linear(6, 8), torch.randn(4, 6)
    pm = partition(model, 2, "data", example_inputs=(x,), progress=False)
    calls: list[Callable[[], object]] = [lambda: grad(lambda rows: pm(rows).sum())(x), lambda: vmap(pm)(x.repeat(2, 1, 1))]
    for call in calls:
        with pytest.raises(ConfigError, match=r"torch\.func \(grad, vmap, jacrev, \.\.\.\) cannot transform a partitioned model"):
            call()
    torch.testing.assert_close(pm(x), model(x))
