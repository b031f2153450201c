"""Perceptrons: a plain chain, a deep residual one, one whose middle has no parameters, and one that returns its loss."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, classes, mean_squared_error, real


class ResidualBlock(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Parameterless(nn.Module):
    """Two layers with a long run of operations between them that owns no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for shift in range(6):
            x = torch.tanh(x + x.roll(shift, dims=-1) / 2)
            x = x - x.mean(dim=-1, keepdim=True)
        return self.last(x.cumsum(dim=-1))


class ReturnsLoss(nn.Module):
    """A classifier whose forward takes the labels and returns a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(7, 7), nn.SiLU())))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), labels)


def multi_layer_perceptron() -> nn.Module:
    """Five hidden layers."""
    hidden = [layer for _ in range(5) for layer in (nn.Linear(12, 12), nn.GELU())]
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), *hidden, nn.Linear(12, 3))


def deep_residual() -> nn.Module:
    """Eight residual blocks."""
    return nn.Sequential(nn.Linear(6, 10), *(ResidualBlock(10) for _ in range(8)), nn.Linear(10, 3))


def _rows(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, 6),), {}


def _labelled_rows(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, 7),), {"labels": classes(generator, 5, batch_size)}


def _target(generator: Generator, batch_size: int) -> Tensor:
    return real(generator, batch_size, 3)


CASES = (
    Case("perceptron", multi_layer_perceptron, _rows, _target, mean_squared_error),
    Case("residual", deep_residual, _rows, _target, mean_squared_error),
    Case("parameterless", Parameterless, _rows, _target, mean_squared_error),
    Case("returns_loss", ReturnsLoss, _labelled_rows),
)
