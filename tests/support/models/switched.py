"""A model that computes something else in training and in evaluation: batch normalisation, dropout, a branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 8


class Switched(nn.Module):
    """Two layers with dropout and running statistics; in training it adds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(8, 6)
        self.drop_again = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(self.drop(self.norm(self.up(x)).relu())).relu()
        if self.training:
            hidden = hidden + x
        result: Tensor = self.head(self.drop_again(hidden))
        return result


def switched(seed: int = 0) -> tuple[Switched, Tensor]:
    """Return the model, and a batch."""
    torch.manual_seed(seed)
    return Switched().double(), torch.randn(ROWS, 6).double()
