"""Models of recommendation: bags of categories beside dense features, and products between all of them (Naumov et al., DLRM, 2019)."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from partitioner import ConfigError
from tests.support.models.case import Case, Inputs, classes, mean_squared_error, real
from tests.support.running.slow_values import slow
from tests.support.running.transparency import first_difference, make_partitioned

WIDTH, DENSE, WORDS, PADDING = 6, 5, 12, 0
LENGTHS = (3, 4)
"""Ids of a bag of each table."""


class Recommendation(nn.Module):
    """Two tables of bags, a perceptron of dense features, the products of all pairs, and a perceptron of these."""

    def __init__(self) -> None:
        super().__init__()
        self.bought = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")
        self.seen = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", padding_idx=PADDING)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 10), nn.ReLU(), nn.Linear(10, WIDTH))
        self.top = nn.Sequential(nn.Linear(9 + WIDTH, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, dense: Tensor, bought: Tensor, seen: Tensor, weights: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, self.bought(bought, None, weights), self.seen(seen)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products], dim=1)).squeeze(-1)


class Largest(nn.Module):
    """A bag's largest features, and a layer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="max", padding_idx=PADDING)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


class Sparse(nn.Module):
    """Bags of the ids between offsets, of which there is one more than rows, as torchrec and fbgemm pass them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.bottom = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", include_last_offset=True), nn.Linear(DENSE, WIDTH)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bottom(dense) * self.bag(ids, offsets)


def sparse(generator: Generator, rows: int) -> Inputs:
    return (real(generator, rows, DENSE), classes(generator, WORDS, 3 * rows), torch.arange(0, 3 * rows + 1, 3)), {}


def padded(generator: Generator, rows: int, length: int) -> Tensor:
    """Draw ids; the first bag has nothing but padding."""
    ids = classes(generator, WORDS, rows, length)
    ids[0] = PADDING
    return ids


def inputs(generator: Generator, rows: int) -> Inputs:
    ids = classes(generator, WORDS, rows, LENGTHS[0])
    weights = real(generator, rows, LENGTHS[0])
    return (real(generator, rows, DENSE), ids, padded(generator, rows, LENGTHS[1]), weights), {}


DLRM = Case("dlrm", Recommendation, inputs, real, mean_squared_error)
SPARSE = Case("sparse", Sparse, sparse, lambda generator, rows: real(generator, rows, WIDTH), mean_squared_error)
LARGEST = Case(
    "largest",
    Largest,
    lambda generator, rows: ((padded(generator, rows, 4),), {}),
    lambda generator, rows: real(generator, rows, 8),
    mean_squared_error,
)


@pytest.mark.parametrize(
    ("case", "mode", "devices", "options"),
    [
        (DLRM, "data", 4, {"n_microbatches": 1}),
        *(
            pytest.param(case, mode, devices, options, marks=pytest.mark.slow)
            for case in (DLRM, LARGEST)
            for mode, devices, options in (
                ("data", 2, {"n_microbatches": 1}),
                ("fsdp", 4, {"n_microbatches": 1}),
                ("zero2", 2, {"n_microbatches": 2}),
                ("pipeline", 2, {"n_microbatches": 2}),
                ("tensor", 2, {"n_microbatches": 1}),
                ({"pipeline": 2, "data": 2}, 4, {"n_microbatches": 2}),
                ({"data": 2, "tensor": 2}, 4, {"n_microbatches": 1}),
            )
        ),
    ],
)
def test_training(case: Case, mode: str | Mapping[str, int], devices: int, options: dict[str, Any]) -> None:
    assert first_difference(case, mode=mode, devices=devices, **options) is None


@pytest.mark.parametrize("mode", ["data", "fsdp", *slow("tensor", "pipeline", {"pipeline": 2, "data": 2})])
def test_an_input_with_one_more_element_than_rows(mode: str | Mapping[str, int]) -> None:
    """Its size follows from the batch; calls with other numbers of rows pass others."""
    instance = SPARSE.build()
    pm = make_partitioned(instance, mode=mode, devices=4 if isinstance(mode, Mapping) else 2)
    generator = torch.Generator().manual_seed(1)
    for rows in (4, 8, 12):
        arguments = sparse(generator, rows)[0]
        torch.testing.assert_close(pm(*arguments), instance.model(*arguments))
    arguments = sparse(generator, 12)[0]
    with pytest.raises(ConfigError, match=r"offsets has shape \(8,\); the model was traced with \(batch \+ 1,\)"):
        pm(*arguments[:2], torch.arange(8))


@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_a_rank_does_the_work_of_its_rows(mode: str) -> None:
    instance = DLRM.build()
    work = {devices: make_partitioned(instance, mode=mode, devices=devices).plan.stages[0].flops for devices in (1, 4)}
    assert work[4] == work[1] / 4
