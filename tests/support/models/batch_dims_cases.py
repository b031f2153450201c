"""Models whose batch is in dimension 1, or beside an input that is as long by accident; and what real processes run of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import PartitionedModel, partition

__all__ = ["ROWS", "WIDTH", "Positions", "Recurrent", "difference", "flat_loss", "in_processes", "recurrent_difference"]

WIDTH, ROWS = 6, 4


class Recurrent(nn.Module):
    """An LSTM with the batch in dimension 1, of its input and of its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(x)[0])
        return output


class Positions(nn.Module):
    """Scales its result by a number computed from positions, which have no batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(8, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        output: Tensor = self.head(self.tokens(tokens) * places[1]) + places.sum()
        return output


def flat_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def difference(
    original: nn.Module, pm: PartitionedModel, args: tuple[Tensor, ...], target: Any, loss_fn: Callable[..., Tensor], own: Any = None
) -> str | None:
    """Return the difference of a step's loss and gradients from the original model's.

    Args:
        own: the arguments and the target that this process passes; None: the whole batch.
    """
    reference = copy.deepcopy(original)
    expected = loss_fn(reference(*args), target)
    expected.backward()
    pm.zero_grad()
    passed, own_target = (args, target) if own is None else own
    loss = pm.train_step(*passed, target=own_target, loss_fn=loss_fn)
    found = pm.full_gradients()
    wrong = [] if torch.allclose(loss, expected.detach(), rtol=1e-10) else [f"loss {loss} for {expected}"]
    for name, parameter in reference.named_parameters():
        gradient = found[name]
        if gradient is None or parameter.grad is None or not torch.allclose(gradient, parameter.grad, rtol=1e-9, atol=1e-12):
            wrong.append(name)
    return ", ".join(wrong) or None


def recurrent_difference(mode: str, length: int, inputs: str = "global") -> str | None:
    """Return ``difference`` of an LSTM for labels (length, batch), in two parts."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(length, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    target = torch.randint(WIDTH, (length, ROWS), generator=generator)
    own, half = None, slice(0, ROWS)
    if inputs == "local":
        half = slice(ROWS // 2 * int(os.environ["RANK"]), ROWS // 2 * (int(os.environ["RANK"]) + 1))
        own = ((x[:, half],), target[:, half])
    options: dict[str, Any] = {"n_microbatches": 2} if mode == "pipeline" else {}
    pm = partition(Recurrent(), devices=2, mode=mode, example_inputs=(x,), inputs=inputs, **options)
    return difference(Recurrent(), pm, (x,), target, flat_loss, own)


def in_processes() -> list[str | None]:
    """Run the same in processes, with the whole batch and with local rows; and an input without a batch."""
    found = [recurrent_difference(mode, length) for mode, length in (("pipeline", ROWS), ("data", ROWS), ("fsdp", 3))]
    found.append(recurrent_difference("data", ROWS // 2, "local"))
    tokens, places = torch.randint(8, (ROWS, 6), generator=torch.Generator().manual_seed(0)), torch.arange(ROWS)
    pm = partition(Positions(), devices=2, mode="data", example_inputs=(tokens, places), batch_dims={"places": None})
    return [*found, difference(Positions(), pm, (tokens, places), tokens % WIDTH, flat_loss)]
