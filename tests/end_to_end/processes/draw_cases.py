"""Models that draw random numbers in every stage, trained by real processes with seeds of their own, beside one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import partition
from partitioner.runtime.torchrun import rank

Mode = str | dict[str, Any]

ROWS, WIDTH = 6, 8


class Noisy(nn.Module):
    """Draws numbers of several distributions between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, fifth, last = self.layers
        x = F.dropout(first(x), 0.3)
        x = second(x) + 0.1 * torch.randn_like(x)
        x = third(x) * torch.rand(x.shape[-1], dtype=x.dtype)
        x = fourth(x) + torch.empty_like(x).uniform_()
        x = F.dropout(fifth(x), 0.5) * torch.bernoulli(x.sigmoid())
        return torch.as_tensor(last(x)) + 0.1 * torch.randn(3, dtype=x.dtype).sum()  # three normal numbers: one is stored for the next


class Attention(nn.Module):
    """Dropout of attention, between recurrent layers and of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.2, batch_first=True)
        self.recurrent = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3)
        self.channels, self.last = nn.Dropout1d(0.4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.encoder(self.first(x).unflatten(-1, (2, 4)).repeat(1, 1, 2)))
        return torch.as_tensor(self.last(self.channels(hidden).mean(1)))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh()))),
    "noisy loss": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "distributions": Noisy,
    "attention": Attention,
}


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    """Draw the noise of its target."""
    return F.mse_loss(output, target + torch.randn_like(target))


def loss_of(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    return noisy_loss if kind == "noisy loss" else F.mse_loss


def built(kind: str) -> nn.Module:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(1)
    return MODELS[kind]().double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return drawn[0], drawn[1]


def of_one_device(kind: str, seed: int, n_microbatches: int) -> list[Tensor]:
    """Return losses and gradients of two steps, a call without gradients, and numbers of the script after each of them."""
    model, (x, target) = built(kind), data()
    found: list[Tensor] = []
    torch.manual_seed(seed)
    for _ in range(2):
        model.zero_grad()
        losses = []
        for rows, wanted in zip(x.chunk(n_microbatches), target.chunk(n_microbatches), strict=True):
            losses.append(loss_of(kind)(model(rows), wanted) / n_microbatches)
        torch.stack(losses).sum().backward()
        found += [
            torch.stack(losses).sum().detach(),
            torch.rand(3),
            *(each.grad.clone() for each in model.parameters() if each.grad is not None),
        ]
    with torch.no_grad():
        found += [torch.cat([model(rows) for rows in x.chunk(n_microbatches)]), torch.rand(3), torch.randn(1)]
    return found


def differences(kind: str, mode: Mode, seeds: str, options: Mapping[str, Any], by_hand: bool) -> list[float]:
    """Return the largest differences to one device.

    Args:
        seeds: ``"alike"``, or ``"by rank"``: all take the state of rank 0.
        options: of ``partition``.
        by_hand: whether the steps are ``pm(x)`` and ``backward()``.
    """
    x, target = data()
    n_devices = int(os.environ.get("WORLD_SIZE", "2"))
    pm = partition(built(kind), n_devices, mode, example_inputs=(x,), progress=False, **options)
    expected = of_one_device(kind, 5, pm.plan.n_microbatches)
    found: list[Tensor] = []
    torch.manual_seed(5 if seeds == "alike" else 5 + rank())
    for _ in range(2):
        pm.zero_grad()
        if by_hand:
            loss = loss_of(kind)(pm(x), target)
            loss.backward()
        else:
            loss = pm.train_step(x, target=target, loss_fn=loss_of(kind))
        drawn = torch.rand(3)
        gradients = pm.full_gradients()
        found += [loss.detach(), drawn, *(each for each in gradients.values() if each is not None)]
    with torch.no_grad():
        found += [pm(x), torch.rand(3), torch.randn(1)]
    return [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
