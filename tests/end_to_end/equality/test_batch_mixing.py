"""A model whose rows depend on each other trains as in one piece, or is refused: microbatches never change its numbers unsaid.

Samples mix where the batch is normalised, sorted, summed or compared, and in losses that are no plain mean over rows. What the rule for
each such operation concludes is not asked here: only that the numbers are those of the original model.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor, nn

from partitioner import ConfigError
from tests.support.models.case import Case, Inputs, classes, mean_squared_error, real
from tests.support.running.transparency import compare, first_difference, partitioned_steps, reference_steps

WIDTH = 6


class Mixed(nn.Module):
    """Two layers, an operation over rows, two more layers."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.after = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.mix(self.before(x)))
        return result


class Loss(nn.Module):
    """Four layers and a loss that the model returns itself."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.layers(x), labels)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda x: x - x.mean(0),
    "normalised": lambda x: (x - x.mean(0)) / x.var(0, unbiased=False).add(1e-5).sqrt(),
    "softmax_over_rows": lambda x: x.softmax(0),
    "summed_over_rows": lambda x: x.cumsum(0),
    "sorted_rows": lambda x: x.sort(0).values,
    "reversed_rows": lambda x: x + x.flip(0),
    "rolled_rows": lambda x: x + x.roll(1, 0),
    "first_row": lambda x: x - x[:1],
    "attention_over_rows": lambda x: (x @ x.T).softmax(-1) @ x,
    "gram": lambda x: x @ (x.T @ x),
    "row_number": lambda x: x + torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1),
    "divided_by_rows": lambda x: x / x.shape[0],
    "reshaped": lambda x: x.reshape(WIDTH, -1).T.reshape(-1, WIDTH),
    "largest_of_all": lambda x: x / x.abs().max(),
}

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class_weights": nn.CrossEntropyLoss(weight=torch.arange(1.0, WIDTH + 1, dtype=torch.float64), ignore_index=0),
    "mean": nn.functional.cross_entropy,
    "twice_the_mean": lambda y, labels: 2 * nn.functional.cross_entropy(y, labels),
    "mean_and_penalty": lambda y, labels: nn.functional.cross_entropy(y, labels) + 0.1 * y.pow(2).mean(),
    "sum": lambda y, labels: nn.functional.cross_entropy(y, labels, reduction="sum"),
    "sum_and_mean": lambda y, labels: nn.functional.cross_entropy(y, labels, reduction="sum") + y.pow(2).mean(),
    "sum_by_rows": lambda y, labels: nn.functional.cross_entropy(y, labels, reduction="sum") / y.shape[0],
    "root_mean_square": lambda y, labels: y.pow(2).mean().sqrt(),
    "logarithm_of_the_mean": lambda y, labels: nn.functional.cross_entropy(y, labels).log(),
    "ignored_labels": lambda y, labels: nn.functional.cross_entropy(y, labels, ignore_index=0),
    "weighted_classes": lambda y, labels: nn.functional.cross_entropy(y, labels, weight=torch.arange(1.0, WIDTH + 1, dtype=y.dtype)),
    "masked_mean": lambda y, labels: (y.pow(2).mean(1) * (labels > 2)).sum() / (labels > 2).sum(),
    "largest": lambda y, labels: y.max(),
    "product_of_means": lambda y, labels: y.pow(2).mean() * nn.functional.cross_entropy(y, labels),
    "norm": lambda y, labels: y.norm(),
    "half_of_the_rows": lambda y, labels: y[: y.shape[0] // 2].pow(2).mean(),
}

PLAIN = ("mean", "twice_the_mean", "mean_and_penalty", "sum", "sum_by_rows")
"""Losses that are a mean or a sum over rows: refusing to microbatch these is wrong too."""


def _rows(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, WIDTH),), {}


def _labelled(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, WIDTH), classes(generator, WIDTH, batch_size)), {}


def _target(generator: Generator, batch_size: int) -> Tensor:
    return real(generator, batch_size, WIDTH)


def _mixed(name: str) -> Case:
    return Case(name, lambda: Mixed(OPERATIONS[name]), _rows, _target, mean_squared_error)


def _returning(name: str) -> Case:
    return Case(name, lambda: Loss(LOSSES[name]), _labelled)


CASES = (*map(_mixed, OPERATIONS), *map(_returning, LOSSES))


def with_quick(*quick: str) -> pytest.MarkDecorator:
    """Return every case; all but those named are slow."""
    marked = [pytest.param(case, id=case.name, marks=() if case.name in quick else pytest.mark.slow) for case in CASES]
    return pytest.mark.parametrize("case", marked)


@with_quick("softmax_over_rows", "gram", "norm")
def test_numbers_stay_when_the_planner_chooses_the_microbatches(case: Case) -> None:
    other = partitioned_steps(case, devices=2, mode="pipeline")
    assert compare(reference_steps(case), other, case.tolerance) is None


@with_quick("centred", "first_row", "reshaped", "largest_of_all", "masked_mean", "product_of_means", "root_mean_square")
def test_numbers_stay_or_microbatches_are_refused(case: Case) -> None:
    try:
        difference = first_difference(case, devices=2, mode="pipeline", n_microbatches=4)
    except ConfigError:
        assert case.name not in PLAIN
        return
    assert difference is None


def by_elements(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0.1] = 0.5
    return x


def by_rows(x: Tensor) -> Tensor:
    x = x.clone()
    x[x.sum(-1) > 0, :] = torch.arange(WIDTH, dtype=x.dtype)
    return x


def by_columns(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, torch.arange(WIDTH) > 2] = x.mean()
    return x


@pytest.mark.parametrize(
    ("assign", "is_of_rows"),
    [(by_elements, True), pytest.param(by_rows, True, marks=pytest.mark.slow), (by_columns, False)],
)
def test_an_assignment_by_mask_mixes_no_rows(assign: Callable[[Tensor], Tensor], *, is_of_rows: bool) -> None:
    case = Case("assigned", lambda: Mixed(assign), _rows, _target, mean_squared_error)
    if is_of_rows:
        assert first_difference(case, devices=2, mode="pipeline", n_microbatches=4) is None
    else:
        with pytest.raises(ConfigError, match="rows of the batch are mixed"):
            partitioned_steps(case, devices=2, mode="pipeline", n_microbatches=4)
