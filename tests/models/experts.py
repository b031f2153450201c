"""A mixture of experts: every expert computes every token, and a gate weighs what it gives."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from tests.models.case import Case, Inputs, mean_squared_error, real

__all__ = ["CASES", "Mixture"]

WIDTH = 6
LENGTH = 5


class Mixture(nn.Module):
    """Each token is given to all experts; what its two best do not give is weighed by zero."""

    def __init__(self, experts: int = 4, inside: int = 10) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, inside) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, inside, WIDTH) / inside**0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(dim=-1)
        best, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(dim=-1, keepdim=True))
        inside = nn.functional.silu(torch.einsum("bsd,edf->bsef", x, self.up))
        given = torch.einsum("bsef,efd->bsed", inside, self.down)
        return torch.einsum("bsed,bse->bsd", given, weights)


class Residual(nn.Module):
    """Two mixtures, each behind a normalisation and beside what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x)


def _tokens(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, LENGTH, WIDTH),), {}


def _target(generator: Generator, batch_size: int) -> Tensor:
    return real(generator, batch_size, LENGTH, 3)


CASES = (Case("mixture_of_experts", Residual, _tokens, _target, mean_squared_error),)
