"""Recurrent networks: an LSTM with the batch first, and a bidirectional GRU with the batch second."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, classes, real

LENGTH = 3


class LongShortTermMemory(nn.Module):
    """An LSTM of two layers and one of one, and a classifier of the last position; batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 7, num_layers=2, batch_first=True)
        self.second = nn.LSTM(7, 7, batch_first=True)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        x, (hidden, _) = self.first(x)
        last = hidden[1:]
        x, _ = self.second(self.norm(x), (last, torch.zeros_like(last)))
        return self.head(x[:, -1])


class GatedRecurrent(nn.Module):
    """A bidirectional GRU whose batch is the second dimension, as recurrent layers have it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 7)
        self.first = nn.GRU(7, 5, bidirectional=True)
        self.second = nn.GRU(10, 5)
        self.head = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.first(torch.tanh(self.embed(x)))
        _, hidden = self.second(x)
        return self.head(hidden[-1])


def _batch_first(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, LENGTH, 6),), {}


def _batch_second(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, LENGTH, batch_size, 6),), {}


def _labels(generator: Generator, batch_size: int) -> Tensor:
    return classes(generator, 4, batch_size)


CASES = (
    Case("lstm", LongShortTermMemory, _batch_first, _labels, nn.functional.cross_entropy),
    Case("gru", GatedRecurrent, _batch_second, _labels, nn.functional.cross_entropy),
)
