"""Losses that are, and are not, a mean over rows; and what real processes run of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import PartitionedModel, partition
from passes.ir.errors import PartitionError

WIDTH, ROWS = 6, 8
WEIGHT = torch.arange(1.0, WIDTH + 1, dtype=torch.float64)

Loss = Callable[[Tensor, Any], Tensor]

MEANS: Mapping[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "ignored_labels": lambda o, t: F.cross_entropy(o, t, ignore_index=0),
    "two_heads": lambda o, t: F.cross_entropy(o, t, ignore_index=0) + 0.4 * F.cross_entropy(o.sin(), t, ignore_index=0),
    "zero_labels": lambda o, t: F.cross_entropy(o, torch.zeros(o.shape[0], dtype=torch.long)),
    "label_smoothing": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
    "constant_and_mean": lambda o, t: 1.5 + (o - F.one_hot(t, WIDTH)).pow(2).mean(),
    "sum_by_rows": lambda o, t: o.pow(2).sum() / o.shape[0],
    "preference": lambda o, t: -F.logsigmoid(o[:, 0] - o[:, 1]).mean(),
    "matrix_norms": lambda o, t: torch.linalg.matrix_norm(o.reshape(-1, 2, 3) - t[:, None, None]).mean(),
    "weighted": lambda o, t: F.cross_entropy(o, t, weight=WEIGHT),
    "weighted_module": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2, label_smoothing=0.2),
    "weighted_nll": lambda o, t: 2 * F.nll_loss(F.log_softmax(o, -1), t, weight=torch.tensor([3.0, 1.0, 0.5, 2.0, 1.0, 4.0]).to(o)),
    "masked": lambda o, t: (o.pow(2).mean(1) * (t > 1)).sum() / (t > 1).sum(),
    "masked_or_none": lambda o, t: (o.pow(2).mean(1) * (t > 4)).sum() / (t > 4).sum().clamp(min=1),
    "weighted_rows": lambda o, t: -(o.sum(1) * t.double().sqrt()).sum() / (t.double().sqrt().sum() + 1e-3),
}
"""Losses of outputs and classes that are a mean over rows, or over the rows that count, or weighted by their targets."""

NEITHER: Mapping[str, Loss] = {
    "root_mean_square": lambda o, t: (o - F.one_hot(t, WIDTH)).pow(2).mean().sqrt(),
    "contrastive": lambda o, t: F.cross_entropy(o @ o.T, torch.arange(o.shape[0])),
    "largest": lambda o, t: o.max(),
    "row_order": lambda o, t: (o.pow(2).sum(1) * torch.arange(o.shape[0])).sum(),
    "decided_by_rows": lambda o, t: F.cross_entropy(o, t) * (2 if o.shape[0] == ROWS else 1),
    "own_gradient": lambda o, t: _Halved.apply(o).pow(2).mean(),  # type: ignore[no-untyped-call]
}
"""Losses that parts of a batch do not add up to, in their value or in their gradients."""


class _Halved(torch.autograd.Function):
    """Itself; its gradient is divided by the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].shape[0]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def labelled(seed: int = 1, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), torch.randint(WIDTH, (rows,), generator=generator)


def difference(original: nn.Module, pm: PartitionedModel, loss_fn: Loss, x: Tensor, target: Any, **options: Any) -> str | None:
    """Return the difference of a step's loss and gradients from the original model's."""
    reference = copy.deepcopy(original)
    expected = loss_fn(reference(x), target)
    expected.backward()
    pm.zero_grad()
    loss = pm.train_step(x, target=target, loss_fn=loss_fn, **options)
    found = pm.full_gradients()
    wrong = [] if torch.allclose(loss, expected.detach(), rtol=1e-10, atol=1e-12, equal_nan=True) else [f"loss {loss} for {expected}"]
    for name, parameter in reference.named_parameters():
        one, other = found[name], parameter.grad
        if one is None or other is None:
            wrong += [] if one is other else [name]
        elif not torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True):
            wrong.append(name)
    return ", ".join(wrong) or None


# -- in processes ------------------------------------------------------------------------------------------------------------------


def refused_then_exact(mode: Any) -> list[str]:
    """Return the error of a loss that is no mean, on this rank; then the differences of ``loss_reduction="batch"``."""
    original = model()
    x, target = labelled()
    pm = partition(model(), devices=2, mode=mode, example_inputs=(x,), n_microbatches=4 if mode == "pipeline" else None)
    found = []
    for name in ("root_mean_square", "contrastive"):
        try:
            pm.train_step(x, target=target, loss_fn=NEITHER[name])
        except PartitionError as error:
            found.append(f"{type(error).__name__} {error.remedy}")
        assert all(parameter.grad is None for parameter in pm.parameters())  # so on every rank
        found.append(str(difference(original, pm, NEITHER[name], x, target, loss_reduction="batch")))
        pm.zero_grad()
    found.append(str(difference(original, pm, MEANS["ignored_labels"], x, target)))
    return [*found, *(str(difference(original, pm, MEANS[name], x, target)) for name in ("weighted", "masked_or_none"))]


def trained_on_own_rows() -> list[str | None]:
    """Train with local rows: a loss without a target takes all rows, one with a target is refused."""
    x, target = labelled()
    rank = int(os.environ["RANK"])
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    pm = partition(model(), devices=2, mode="data", example_inputs=(x,), inputs="local")
    found = [_difference_of_rows(pm, NEITHER["contrastive"], x, None, half, "batch")]
    for reduction in ("mean", "batch"):
        try:
            found.append(_difference_of_rows(pm, NEITHER["root_mean_square"], x, target, half, reduction))
        except PartitionError as error:
            found.append(type(error).__name__)
    counted = ("ignored_labels", "weighted", "masked_or_none", "weighted_rows", "two_heads", "zero_labels")
    return [*found, *(_difference_of_rows(pm, MEANS[name], x, target, half, "mean") for name in counted)]


def _difference_of_rows(pm: PartitionedModel, loss_fn: Loss, x: Tensor, target: Tensor | None, rows: slice, reduction: Any) -> str | None:
    """Return ``difference`` of a process that passes its own rows."""
    own = _Rows(pm, rows)
    return difference(model(), own, loss_fn, x, target, loss_reduction=reduction)  # type: ignore[arg-type]


class _Rows:
    """A partitioned model that is given whole batches, and passes its own rows."""

    def __init__(self, pm: PartitionedModel, rows: slice) -> None:
        self.pm, self.rows = pm, rows
        self.zero_grad, self.full_gradients = pm.zero_grad, pm.full_gradients

    def train_step(self, x: Tensor, *, target: Tensor | None, **options: Any) -> Tensor:
        return self.pm.train_step(x[self.rows], target=None if target is None else target[self.rows], **options)
