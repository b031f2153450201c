"""Models that branch on the size of their batch: whatever size is passed, the numbers are those of the model, or it is refused."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, partition
from tests.support.running.slow_values import slow

LARGE = 64


def _another_call(y: Tensor, *, is_large: bool) -> Tensor:
    return y * 2 if is_large else y


def _another_number(y: Tensor, *, is_large: bool) -> Tensor:
    return y * (2 if is_large else 3)


def _mixed_rows(y: Tensor, *, is_large: bool) -> Tensor:
    return y - y.mean(0) if is_large else y


class _Branching(nn.Module):
    """Two layers; between them something that depends on whether the batch is large.

    Args:
        between: that.
        is_constant: whether a trace makes the size of the batch a constant, and knows nothing of the branch.
    """

    def __init__(self, between: Callable[..., Tensor], *, is_constant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between, self.is_constant = between, is_constant

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x) if self.is_constant else x.shape[0]
        return self.second(self.between(self.first(x).relu(), is_large=rows >= LARGE))


MODES: Mapping[str, tuple[str | Mapping[str, int], int]] = {
    "pipeline": ("pipeline", 4),
    "data": ("data", 1),
    "fsdp": ("fsdp", 1),
    "data x pipeline": ({"data": 2, "pipeline": 2}, 2),
}


QUICK = {(_another_number, False, "data"), (_mixed_rows, False, "pipeline")}


@pytest.mark.parametrize(
    ("between", "is_constant", "mode"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product((_another_call, _another_number, _mixed_rows), (False, True), MODES)
    ],
)
@pytest.mark.parametrize("traced", [8, *slow(32, 64)])
def test_every_batch_size_gives_the_numbers_of_the_model(between: Callable[..., Tensor], is_constant: bool, traced: int, mode: str) -> None:
    torch.manual_seed(0)
    module = _Branching(between, is_constant=is_constant).double()
    of_mesh, count = MODES[mode]
    n_devices = 4 if isinstance(of_mesh, dict) else 2

    def partitioned() -> PartitionedModel:
        return partition(module, n_devices, of_mesh, example_inputs=_rows(traced), n_microbatches=count, progress=False)

    if count > 1 and traced >= LARGE:
        with pytest.raises(ConfigError, match="microbatches"):
            partitioned()
        return
    pm = partitioned()
    for rows in (traced, 32, 128):
        if count > 1 and rows >= LARGE and (rows // count < LARGE or between is _mixed_rows):
            with pytest.raises(ConfigError, match=r"computes something else for|rows of the batch are mixed"):
                pm(_rows(rows))
        else:
            _assert_same_step(pm, module, rows)


def _assert_same_step(pm: PartitionedModel, module: nn.Module, rows: int) -> None:
    x, target = _rows(rows), _rows(rows)
    module.zero_grad()
    pm.zero_grad()
    expected = nn.functional.mse_loss(module(x), target)
    expected.backward()
    torch.testing.assert_close(pm(x), module(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss), expected.detach(), rtol=0, atol=1e-12)
    gradients = pm.full_gradients()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)


def _rows(count: int) -> Tensor:
    return torch.randn(count, 8, dtype=torch.float64)


class _MeanOfBranch(nn.Module):
    """A layer whose output is doubled for small batches, and its mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y if x.shape[0] > 5 else 2 * y).square().mean()


@pytest.mark.parametrize("mode", [{"data": 2}, *slow({"fsdp": 2}, {"data": 2, "tensor": 2}, {"pipeline": 1, "data": 2})])
def test_a_mean_over_a_batch_of_one_size_is_that_of_the_model(mode: Mapping[str, int]) -> None:
    model = _MeanOfBranch().double()
    pm = partition(model, math.prod(mode.values()), mode, example_inputs=(torch.randn(8, 4, dtype=torch.float64),), progress=False)
    for rows in (8, 4):
        x = torch.randn(rows, 4, dtype=torch.float64)
        expected = model(x)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        pm.zero_grad()
        loss = pm(x)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(list(pm.full_gradients().values()), list(gradients))
        pm.zero_grad()
        torch.testing.assert_close(pm.train_step(x), expected)
        torch.testing.assert_close(list(pm.full_gradients().values()), list(gradients))
