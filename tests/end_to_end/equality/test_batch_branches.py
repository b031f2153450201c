"""Models that branch on the size of their batch: whatever size is passed, the numbers are those of the model, or it is refused."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, partition

LARGE = 64


class _Branching(nn.Module):
    """Two layers; between them something that depends on whether the batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).relu(), is_large=x.shape[0] >= LARGE))

    def between(self, y: Tensor, *, is_large: bool) -> Tensor:
        raise NotImplementedError


class _AnotherCall(_Branching):
    def between(self, y: Tensor, *, is_large: bool) -> Tensor:
        return y * 2 if is_large else y


class _Constant(_AnotherCall):
    """A trace makes the size of its batch a constant, and knows nothing of the branch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).relu(), is_large=len(x) >= LARGE))


class _AnotherNumber(_Branching):
    def between(self, y: Tensor, *, is_large: bool) -> Tensor:
        return y * (2 if is_large else 3)


class _MixedRows(_Branching):
    def between(self, y: Tensor, *, is_large: bool) -> Tensor:
        return y - y.mean(0) if is_large else y


MODES: Mapping[str, tuple[str | Mapping[str, int], int]] = {
    "pipeline": ("pipeline", 4),
    "data": ("data", 1),
    "fsdp": ("fsdp", 1),
    "data x pipeline": ({"data": 2, "pipeline": 2}, 2),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [_AnotherCall, _Constant, _AnotherNumber, _MixedRows])
@pytest.mark.parametrize("traced", [8, 32, 64])
def test_every_batch_size_gives_the_numbers_of_the_model(model: type[_Branching], traced: int, mode: str) -> None:
    torch.manual_seed(0)
    module = model().double()
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
        if count > 1 and rows >= LARGE and (rows // count < LARGE or model is _MixedRows):
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
