"""Dataclasses as results, arguments and targets: taken apart without registering the user's classes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from partitioner import partition
from tests.support.running.slow_values import slow


@dataclasses.dataclass
class Scored:
    logits: Tensor
    loss: Tensor | None = None
    classes: int = 3


@dataclasses.dataclass(frozen=True)
class Nested:
    first: Scored
    more: list[Any]
    name: str = "net"

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.first.logits.sum(-1))


@dataclasses.dataclass
class Batch:
    x: Tensor
    labels: Tensor
    scale: float = 2.0


class Net(nn.Module):
    """Takes and returns dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, batch: Batch) -> Nested:
        logits = self.second(torch.tanh(self.first(batch.x))) * batch.scale
        return Nested(Scored(logits, F.cross_entropy(logits, batch.labels)), [Scored(logits + 1), logits.exp()])


class WithLoss(Net):
    def forward(self, batch: Batch) -> Scored:  # type: ignore[override]
        return super().forward(batch).first


def batch_of(rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return Batch(torch.randn(rows, 6, generator=generator, dtype=torch.float64), torch.randint(3, (rows,), generator=generator))


MODES = ["pipeline", *slow("data", "model")]


@pytest.mark.parametrize("mode", MODES)
def test_results_and_arguments(mode: str) -> None:
    original = Net()
    pm = partition(copy.deepcopy(original), devices=2, mode=mode, example_inputs=(batch_of(),))
    for batch in (batch_of(), batch_of(6), dataclasses.replace(batch_of(), scale=3.0)):
        found, expected = pm(batch), original(batch)
        assert (type(found), type(found.first), type(found.more[0])) == (Nested, Scored, Scored)
        assert (found.name, found.first.classes) == (expected.name, 3)
        torch.testing.assert_close(found.total, expected.total)
        torch.testing.assert_close(found.more[0].logits, expected.more[0].logits)
        torch.testing.assert_close(found.first.loss, expected.first.loss)
    original(batch_of()).total.sum().backward()
    pm(batch_of()).total.sum().backward()
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(pm.full_gradients()[name], parameter.grad)
    assert not {Scored, Nested, Batch} & _pytree.SUPPORTED_NODES.keys()


@pytest.mark.parametrize("mode", MODES)
def test_losses(mode: str) -> None:
    """The loss that a dataclass has; and one of a dataclass and a target that is one."""
    batch = batch_of()
    original = WithLoss()
    pm = partition(WithLoss(), devices=2, mode=mode, example_inputs=(batch,))
    expected = original(batch).loss
    torch.testing.assert_close(pm.train_step(batch), expected.detach())

    def loss_fn(output: Scored, target: Batch) -> Tensor:
        return (F.cross_entropy(output.logits, target.labels, reduction="none") * target.x[:, 0]).mean() * target.scale

    pm.zero_grad()
    of_target = loss_fn(original(batch), batch)
    of_target.backward()
    torch.testing.assert_close(pm.train_step(batch, target=batch, loss_fn=loss_fn), of_target.detach())
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(pm.full_gradients()[name], parameter.grad)
