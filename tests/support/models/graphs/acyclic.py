"""Graphs that are no chain: a layer used twice, values with several later users, in-place writes."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, mean_squared_error, real


class SharedLayer(nn.Module):
    """One layer at the beginning, in the middle and at the end of a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(9, 9)
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(9, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.second(x))
        return self.head(torch.tanh(self.shared(x)))


class Branches(nn.Module):
    """Each layer reads the outputs of all layers before it: every value has users in many later stages."""

    def __init__(self, width: int = 6, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear((index + 1) * width, width) for index in range(depth))
        self.head = nn.Linear((depth + 1) * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer in self.layers:
            values.append(torch.tanh(layer(torch.cat(values, dim=-1))))
        return self.head(torch.cat(values, dim=-1))


class InPlace(nn.Module):
    """Writes into its own values: whole tensors, slices, and a total that every stage adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.layers[0](x)
        kept[:, :2] = 0.5
        total = torch.zeros_like(kept)
        total += kept
        y = self.layers[1](kept)
        y += kept
        total.add_(y.relu_())
        scaled = self.layers[2](y)
        scaled[:, 3:].mul_(2.0)
        scaled.masked_fill_(kept > 1.0, 0.0)
        total[:, ::2] += scaled[:, ::2]
        return self.head(torch.tanh(self.layers[3](scaled)) + total)


def _rows(width: int) -> Callable[[Generator, int], Inputs]:
    def draw(generator: Generator, batch_size: int) -> Inputs:
        return (real(generator, batch_size, width),), {}

    return draw


def _target(generator: Generator, batch_size: int) -> Tensor:
    return real(generator, batch_size, 3)


CASES = (
    Case("shared_layer", SharedLayer, _rows(9), _target, mean_squared_error),
    Case("branches", Branches, _rows(6), _target, mean_squared_error),
    Case("in_place", InPlace, _rows(6), _target, mean_squared_error),
)
