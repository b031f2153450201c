"""Ranks that share the batch and still do most of the work of one device: a note names the operation, and a warning repeats it, once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, PartitionWarning, partition
from tests.support.running.slow_values import slow

WIDTH = 8

BAGS = (torch.arange(24) % 9, torch.arange(8) * 3)
"""Ids, and the start of each of eight bags."""


class Layers(nn.Module):
    """Two layers of equal work, and a function of the values between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Bags(nn.Module):
    """Bags whose offsets are an input, and a layer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.EmbeddingBag(9, WIDTH, mode="sum"), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.last(self.table(ids, offsets))


class Fused(nn.Module):
    """A layer whose weight is a product of larger ones, after an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(WIDTH, 256)), nn.Parameter(torch.randn(256, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return without_rule(x) @ (self.left @ self.right)


def without_rule(x: Tensor) -> Tensor:
    return torch.renorm(x, 2, 0, 1.0)


def warned(model: nn.Module, mode: str | Mapping[str, int], *inputs: Tensor, devices: int = 4) -> tuple[PartitionedModel, list[str]]:
    """Return the partitioned model, and the texts of all warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pm = partition(model, devices, mode, example_inputs=inputs or (torch.randn(8, WIDTH),), progress=False)
    assert all(issubclass(each.category, PartitionWarning) and each.filename == __file__ for each in found)
    return pm, [str(each.message) for each in found]


@pytest.mark.parametrize("mode", ["data", *slow("fsdp", "zero1", "zero2")])
def test_rows_are_gathered_for_an_operation_without_a_rule(mode: str) -> None:
    pm, texts = warned(nn.Sequential(Layers(nn.ReLU(), 8), Layers(without_rule, 72)), mode)
    note = (
        f"Every rank of {mode} computes 45% of the multiply-adds whole: 1.last. "
        "The rows of all ranks are gathered for aten.renorm.default (1)."
    )
    assert note in pm.plan.notes
    assert not texts


@pytest.mark.parametrize("mode", ["data", *slow("fsdp", "zero1", "zero2")])
def test_most_of_the_work_is_warned_of(mode: str) -> None:
    pm, (text,) = warned(Layers(without_rule), mode)
    note = (
        f"Every rank of {mode} computes 50% of the multiply-adds whole: last. "
        "The rows of all ranks are gathered for aten.renorm.default (the model itself). Sharding the batch gains little."
    )
    assert note in pm.plan.notes
    assert text.startswith(f"{note}\n  remedy: ")
    assert pm.plan.stages[0].flops == pytest.approx(2 * 8 * WIDTH**2 * 1.25, rel=0.2)


def test_rows_are_gathered_for_bags_of_any_length() -> None:
    pm, (text,) = warned(Bags(), "data", *BAGS)
    assert "100% of the multiply-adds whole: last. The rows of all ranks are gathered for aten.embedding_bag.padding_idx (table)" in text
    assert any(note in text for note in pm.plan.notes)


def test_two_dimensions_are_one_warning() -> None:
    _, (text,) = warned(Layers(without_rule), {"data": 2, "fsdp": 2})
    assert all(f"Every rank of {name} computes 50%" in text for name in ("data", "fsdp"))


def test_what_depends_on_weights_alone_is_not_counted() -> None:
    """Data parallelism computes it on every rank, whatever the operations are."""
    pm, texts = warned(Fused(), "data")
    (note,) = (note for note in pm.plan.notes if "multiply-adds whole" in note)
    assert note.startswith("Every rank of data computes 3% of the multiply-adds whole")
    assert not texts


@pytest.mark.parametrize("between", [nn.ReLU(), lambda x: x.softmax(0), lambda x: x - x.mean(0)])
def test_operations_that_are_cut_are_not_named(between: Callable[[Tensor], Tensor]) -> None:
    pm, texts = warned(Layers(between), "data")
    assert not [note for note in pm.plan.notes if "multiply-adds whole" in note]
    assert not texts
