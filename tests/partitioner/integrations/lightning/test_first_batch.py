"""Looking at the first batch leaves the loader, and what its data set remembers, as they were."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

pytest.importorskip("lightning")

from partitioner.integrations.lightning.first_batch import first_batch

LARGE = torch.zeros(2**18 + 1)


class Noisy(Dataset[Tensor]):
    """Draws from a generator of its own, counts, and has an array, and a lock that cannot be copied."""

    def __init__(self, lock: Any = None) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.count = torch.zeros(())
        self.large = LARGE
        self.lock = lock

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self.count += 1
        assert self.large is LARGE
        return index + torch.rand(2, generator=self.generator)


class Stream(IterableDataset[Tensor]):
    """Scales its rows by how often it was read."""

    def __init__(self, lock: Any = None) -> None:
        self.epoch = 0
        self.lock = lock

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        return iter([torch.full((2,), float(self.epoch))] * 8)


class Collating:
    """Collates rows, with noise of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, rows: list[Tensor]) -> Tensor:
        return default_collate(rows) + torch.rand((), generator=self.generator)


def first(loader: Any) -> Any:
    """Return the first batch of a Trainer with this loader."""
    source = SimpleNamespace(_data_source=SimpleNamespace(dataloader=lambda: loader))
    strategy = SimpleNamespace(batch_to_device=lambda batch, dataloader_idx: batch)
    plugin = SimpleNamespace(convert_input=lambda batch: batch)
    return first_batch(SimpleNamespace(fit_loop=source, strategy=strategy, precision_plugin=plugin), "fit")


@pytest.mark.parametrize("make", [Noisy, lambda: Noisy(threading.Lock()), Stream])
def test_data_sets_are_as_they_were(make: Any) -> None:
    looked_at, other = (DataLoader(make(), batch_size=4, collate_fn=Collating()) for _ in range(2))
    expected = [*other, *other]
    torch.testing.assert_close(first({"a": looked_at})["a"], expected[0])
    found = [*looked_at, *looked_at]
    torch.testing.assert_close(found, expected)


def test_a_stream_that_cannot_be_copied_is_not_read() -> None:
    stream = Stream(threading.Lock())
    assert first(DataLoader(stream, batch_size=4)) is None
    assert stream.epoch == 0
    assert first(iter([torch.ones(2)])) is None
