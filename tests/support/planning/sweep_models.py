"""Small models for sweeps, made where every process finds them."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
from torch import Tensor, nn


def perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Four layers."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*layers), (torch.zeros(16, 8),)


def wide() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model on the meta device, which is never computed."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)), (torch.zeros(32, 64),)


class Branches(nn.Module):
    """Cannot be traced: its control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def branches() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model that is no graph."""
    return Branches(), (torch.zeros(4, 4),)


def fails() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Fail to make a model."""
    raise ArithmeticError("the weights are gone")
