"""Classes that programs use: submodules that keep tensors, and dataclasses of arguments and results."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Pair:
    """Two arguments, of a class that PyTorch knows."""

    left: Tensor
    right: Any


torch.export.register_dataclass(Pair)


@dataclass
class Loose:
    """Two arguments, of a class that PyTorch does not know."""

    left: Tensor
    right: Any


@dataclass
class Result:
    """Results by name."""

    last: Tensor
    other: Any = None


class Keeps(nn.Module):
    """Keeps the mean square of its result, as layers with a penalty do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.l_aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.l_aux = (y * y).mean()
        return y


class Routes(nn.Module):
    """Scales its input by the shares of experts, and keeps the loss that balances them."""

    def __init__(self, size: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, experts)
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shares: Tensor = self.gate(x).softmax(-1)
        self.balance = shares.flatten(0, -2).mean(0).square().sum() * shares.shape[-1]
        return x * shares.amax(-1, keepdim=True)


class Collects(nn.Module):
    """Keeps its result in a dict, and parts of it in a list."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.found: dict[str, Tensor] = {}
        self.parts: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.found["hidden"] = y
        self.parts = [y.tanh(), y.mean()]
        return y


class Remembers(nn.Module):
    """Keeps its last result, without its history."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.last = y.detach()
        return y


CLASSES: dict[str, type] = {each.__name__: each for each in (Pair, Loose, Result, Keeps, Routes, Collects, Remembers)}

KEPT = {
    "Keeps": ("l_aux",),
    "Routes": ("balance",),
    "Collects": ("found['hidden']", "parts[0]", "parts[1]"),
    "Remembers": ("last",),
}
"""Kept values of each submodule."""


def sources_of(text: str) -> str:
    """Return the source of the classes that a text names."""
    used = [each for name, each in CLASSES.items() if re.search(rf"\b{name}\(", text)]
    registered = "torch.export.register_dataclass(Pair)\n" if Pair in used else ""
    return "\n\n".join(map(inspect.getsource, used)) + registered
