"""A loss is recognized by its code and by the state that it reads; what an inspection of it changes is restored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import PartitionedModel
from partitioner.model.losses.reachable_state import loss_key
from passes.ir.errors import ConfigError
from tests.support.processes import loss_cases as cases
from tests.support.processes.loss_cases import difference, labelled
from tests.support.running.slow_values import slow


def test_a_switch_that_a_loss_reads_is_seen(pipeline: PartitionedModel) -> None:
    x, target = labelled()
    criterion = nn.CrossEntropyLoss()
    assert difference(cases.model(), pipeline, criterion, x, target) is None
    criterion.reduction = "sum"
    with pytest.raises(ConfigError, match='pass loss_reduction="sum"'):
        pipeline.train_step(x, target=target, loss_fn=criterion)


class Wrapped(nn.Module):
    """A loss in a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss()

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = self.inner(o, t)
        return loss


def test_switches_in_containers_and_parts_are_seen(pipeline: PartitionedModel) -> None:
    x, target = labelled()
    options, words, nested, wrapped = {"reduction": "mean"}, ["mean"], SimpleNamespace(loss=SimpleNamespace(reduction="mean")), Wrapped()
    losses: list[Callable[..., Tensor]] = [
        lambda o, t: F.cross_entropy(o, t, reduction=options["reduction"]),
        lambda o, t: F.cross_entropy(o, t, reduction=words[0]),
        lambda o, t: F.cross_entropy(o, t, reduction=nested.loss.reduction),
        wrapped,
    ]
    for loss_fn in losses:
        assert difference(cases.model(), pipeline, loss_fn, x, target) is None
    options["reduction"] = words[0] = nested.loss.reduction = wrapped.inner.reduction = "sum"
    for loss_fn in losses:
        with pytest.raises(ConfigError, match='pass loss_reduction="sum"'):
            pipeline.train_step(x, target=target, loss_fn=loss_fn)


def test_equal_functions_have_equal_keys() -> None:
    def made(factor: float, weight: Tensor) -> Callable[..., Tensor]:
        return lambda o, t: factor * (o * weight - t).pow(2).mean()

    one, other = made(0.5, torch.ones(2)), made(0.5, torch.zeros(2))
    assert loss_key(one) == loss_key(other)
    assert loss_key(one) != loss_key(made(0.25, torch.ones(2)))
    assert loss_key(one, exact=False) == loss_key(made(0.25, torch.ones(2)), exact=False)
    assert loss_key(one, exact=False) != loss_key(made(-0.25, torch.ones(2)), exact=False)
    assert loss_key(nn.MSELoss()) != loss_key(nn.MSELoss())


def test_a_factor_that_becomes_one_for_each_row_is_seen(pipeline: PartitionedModel) -> None:
    """The factor fits the rows of a microbatch, and not those of the batch, for which the loss is not defined."""
    x, target = labelled()

    def made(factor: Tensor) -> Callable[..., Tensor]:
        return lambda o, t: (F.cross_entropy(o, t, reduction="none") * factor).mean()

    factor = torch.tensor(0.5, dtype=torch.float64)
    assert difference(cases.model(), pipeline, made(factor), x[:6], target[:6]) is None
    with pytest.raises(ConfigError, match="must match the size of tensor b"):
        pipeline.train_step(x[:6], target=target[:6], loss_fn=made(factor.repeat(2)))


class Counting(nn.Module):
    """A loss that counts its calls, in a buffer and outside of it, and reads the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.history: list[int] = []

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(len(self.history))
        return o.pow(2).mean() * len(self.history)


def test_a_loss_with_a_state_is_called_once_a_step(pipeline: PartitionedModel) -> None:
    """Neither what looks at a loss, nor the other microbatches, count as calls."""
    x, target = labelled()
    loss_fn, reference = Counting(), Counting()
    with pytest.raises(ConfigError, match="changes what later calls read"):
        pipeline.train_step(x, target=target, loss_fn=loss_fn)
    for _ in range(2):
        loss = pipeline.train_step(x, target=target, loss_fn=loss_fn, loss_reduction="batch")
        torch.testing.assert_close(loss, reference(cases.model()(x), target).detach())
    assert loss_fn.calls == reference.calls == 2
    assert loss_fn.history == reference.history


def counting_in(kind: str) -> Callable[..., Tensor]:
    """Return a loss that multiplies by the number of its calls, which it counts in a container."""
    numbers, of_name, nested, holder = [0], {"calls": 0}, [[0]], nn.Module()
    holder.counts = {"calls": [0]}  # type: ignore[assignment]

    def counted(o: Tensor, t: Tensor) -> Tensor:
        found: Any = {"list": numbers, "dict": of_name, "nested": nested[0], "module": holder.counts["calls"]}[kind]  # type: ignore[index]
        key: Any = "calls" if kind == "dict" else 0
        found[key] += 1
        loss: Tensor = o.pow(2).mean() * found[key]
        return loss

    return counted


@pytest.mark.parametrize("kind", ["list", "dict", "nested", "module"])
def test_counts_in_containers_are_seen(pipeline: PartitionedModel, kind: str) -> None:
    """Each microbatch would count: the loss is refused, and called once if it takes all rows."""
    x, target = labelled()
    name = {"list": "numbers", "dict": "of_name", "nested": "nested", "module": "Module.counts"}[kind]
    with pytest.raises(ConfigError, match=f"changes what later calls read: {name}"):
        pipeline.train_step(x, target=target, loss_fn=counting_in(kind))
    loss_fn, reference = counting_in(kind), counting_in(kind)
    for _ in range(2):
        loss = pipeline.train_step(x, target=target, loss_fn=loss_fn, loss_reduction="batch")
        torch.testing.assert_close(loss, reference(cases.model()(x), target).detach())


@pytest.mark.parametrize("logged", [Tensor.detach, *slow(Tensor.item)])
def test_a_list_of_the_caller_is_named(pipeline: PartitionedModel, logged: Callable[[Tensor], object]) -> None:
    """Also where the loss reads values of tensors. Its entries are those of the steps alone."""
    history: list[object] = []

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        loss = F.cross_entropy(o, t)
        history.append(logged(loss))
        return loss

    x, target = labelled()
    with pytest.raises(ConfigError, match="changes what later calls read: history"):
        pipeline.train_step(x, target=target, loss_fn=loss_fn)
    loss = pipeline.train_step(x, target=target, loss_fn=loss_fn, loss_reduction="batch")
    torch.testing.assert_close(torch.as_tensor(history, dtype=torch.float64), loss.reshape(1))


def test_random_numbers_are_as_many_as_without_a_proof(pipeline: PartitionedModel) -> None:
    x, target = labelled()
    state = torch.get_rng_state()
    pipeline.train_step(x, target=target, loss_fn=lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2))
    with pytest.raises(ConfigError):
        pipeline.train_step(x, target=target, loss_fn=lambda o, t: o.pow(2).mean().sqrt())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_scaler_inside(pm: PartitionedModel) -> None:
    """Its first call makes its scale: not of what a proof computes with."""
    x, target = labelled()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return scaler.scale(o.pow(2).mean())

    assert difference(cases.model(), pm, loss_fn, x, target) is None
    assert scaler.get_scale() == 1024.0
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.0)
    scaler.step(optimizer)
    scaler.update()
