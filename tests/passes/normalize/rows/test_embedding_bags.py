"""Bags of a matrix of ids are lookups and reductions, equal to the kernel's; all other bags stay as the model has them."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.graph.schemas import packet
from passes.ir.graph import ModelGraph
from tests.support.running.slow_values import slow
from tests.support.running.traced import assert_equal_runs, run_model, run_traced

aten = torch.ops.aten

WORDS, WIDTH, ROWS = 9, 6, 5


class Bags(nn.Module):
    """One table of bags; ``offsets`` and ``weights`` are inputs."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, **options)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.bag(ids, offsets, weights)


class Written(nn.Module):
    """Bags of offsets that a function of the ids and the table writes."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(ids, self.table)


def ids_of(length: int, padding: int | None, dtype: torch.dtype = torch.int64) -> Tensor:
    """Draw bags with equal ids among them; with padding, one has nothing else, and one has none."""
    ids = torch.randint(WORDS, (ROWS, length), generator=torch.Generator().manual_seed(0), dtype=dtype)
    if padding is not None:
        ids[:, 0] = padding
        ids[2] = padding
        ids[3] = (padding + 1) % WORDS
    return ids


def calls_bags(graph: ModelGraph) -> bool:
    return any(packet(node.target) is aten.embedding_bag for node in graph.graph.nodes)


def assert_written_as_lookup(model: nn.Module, *args: Any) -> None:
    graph = trace(model.double(), args)
    assert not calls_bags(graph)
    assert not any(packet(node.target) is aten.arange for node in graph.graph.nodes)
    assert_equal_runs(run_traced(graph, model, args, {}), run_model(model, args, {}))


@pytest.mark.parametrize("dtype", [torch.int64, *slow(torch.int32)])
@pytest.mark.parametrize("length", [4, *slow(1, 33)])
@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_a_matrix(mode: str, padding: int | None, length: int, dtype: torch.dtype) -> None:
    model = Bags(mode=mode, padding_idx=padding)
    assert_written_as_lookup(model, ids_of(length, model.bag.padding_idx, dtype))


@pytest.mark.parametrize("padding", [None, 0])
def test_weights_of_ids(padding: int | None) -> None:
    """Their gradients, too: those of padding are zero."""
    weights = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_written_as_lookup(Bags(mode="sum", padding_idx=padding), ids_of(4, padding), None, weights)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_nothing_of_the_padding_is_read(mode: str) -> None:
    model = Bags(mode=mode, padding_idx=0)
    with torch.no_grad():
        model.bag.weight[0] = math.nan
    assert_written_as_lookup(model, ids_of(4, 0))


def test_the_gradient_of_equal_elements_is_that_of_the_first() -> None:
    model = Bags(mode="max")
    with torch.no_grad():
        model.bag.weight.fill_(1.0)
    assert_written_as_lookup(model, ids_of(4, None))


def test_flattened_rows() -> None:
    """Bags of a dimension beside the batch, and offsets that a model writes itself."""

    def two_bags_a_row(ids: Tensor, table: Tensor) -> Tensor:
        rows = ids.reshape(-1, ids.shape[-1])
        starts = torch.arange(0, rows.numel(), rows.shape[1])
        return F.embedding_bag(rows.flatten(), table, starts).view(*ids.shape[:2], WIDTH)

    assert_written_as_lookup(Written(two_bags_a_row), ids_of(6, None).view(ROWS, 2, 3))


def halves(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(ids.flatten(), table, torch.arange(0, ids.numel(), 2))


def last_is_longer(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(ids.flatten(), table, torch.arange(0, ids.numel() - 4, 4))


def with_end(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(ids.flatten(), table, torch.arange(0, ids.numel() + 1, 4), include_last_offset=True)


def test_bags_of_other_lengths_stay() -> None:
    """Offsets are an input, or cut the ids where rows do not end, or leave the last bag longer, or hold the end of the last."""
    flat, offsets = ids_of(4, None).flatten(), torch.tensor([0, 3, 3, 11])
    cases: list[tuple[nn.Module, tuple[Tensor, ...]]] = [
        (Bags(), (flat, offsets)),
        (Bags(include_last_offset=True), (flat, torch.tensor([0, 3, 20]))),
        *((Written(function), (ids_of(4, None),)) for function in (halves, last_is_longer, with_end)),
    ]
    for model, args in cases:
        graph = trace(model.double(), args)
        assert calls_bags(graph)
        assert_equal_runs(run_traced(graph, model, args, {}), run_model(model, args, {}))


def test_gradients_scaled_by_frequency_stay() -> None:
    """They count the ids of the whole batch."""
    model = Bags(scale_grad_by_freq=True).double()
    assert calls_bags(trace(model, (ids_of(4, None),)))
