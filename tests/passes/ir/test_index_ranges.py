"""Elements that ranks read from each other, compared with lists: texts, owners, fetching, and returned gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partitioner.runtime.collectives.exchange import Exchange
from partitioner.runtime.collectives.halo import Halo
from passes.ir.comm.index_ranges import Run, Runs, forward_runs, from_text, length, put_runs, segments, take_runs, to_text

FILL = 7.0


def elements(runs: Runs) -> list[int | None]:
    """Return the elements one by one; None is padding."""
    return [None if run.step == 0 else run.start + run.step * offset for run in runs for offset in range(run.count)]


@dataclass(frozen=True)
class Reading:
    """Ranks that read of each other.

    Attributes:
        owned: how many elements each has.
        indices: what each reads, one by one; None is padding.
    """

    owned: tuple[int, ...]
    indices: tuple[tuple[int | None, ...], ...]

    @property
    def wanted(self) -> str:
        return to_text(forward_runs(each) for each in self.indices)

    @property
    def starts(self) -> list[int]:
        return [sum(self.owned[:rank]) for rank in range(len(self.owned))]


def element_lists(size: int) -> st.SearchStrategy[tuple[int | None, ...]]:
    """Draw windows that may begin and end beyond the ends, forwards or backwards, one after another."""

    def window(bounds: tuple[int, int]) -> list[int | None]:
        first, last = bounds
        step = 1 if last >= first else -1
        return [index if 0 <= index < size else None for index in range(first, last + step, step)]

    windows = st.tuples(st.integers(-3, size + 2), st.integers(-3, size + 2)).map(window)
    return st.lists(windows, min_size=1, max_size=3).map(lambda found: tuple(index for each in found for index in each))


@st.composite
def readings(draw: st.DrawFn) -> Reading:
    owned = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    return Reading(owned, tuple(draw(element_lists(sum(owned))) for _ in owned))


def whole_of(size: int, dim: int) -> Tensor:
    """Return different whole numbers: sums of them are exact."""
    shape = [2, 2, 2]
    shape[dim] = size
    return torch.arange(float(4 * size), dtype=torch.float64).view(shape)


def picked(x: Tensor, dim: int, indices: Sequence[int | None]) -> Tensor:
    """Return the elements one by one, with padding: the expected result of ``take_runs`` and a halo exchange."""
    slices = [torch.full_like(x.select(dim, 0), FILL) if index is None else x.select(dim, index) for index in indices]
    return torch.stack(slices, dim)


def added(gradient: Tensor, dim: int, indices: Sequence[int | None], size: int) -> Tensor:
    """Add the gradients of every element's readers, one by one."""
    shape = list(gradient.shape)
    shape[dim] = size
    total = gradient.new_zeros(shape)
    for place, index in enumerate(indices):
        if index is not None:
            total.select(dim, index).add_(gradient.select(dim, place))
    return total


def carried_out(exchanges: Sequence[Exchange]) -> list[Tensor]:
    """Return the results of all ranks: each takes the pieces that other ranks have for it."""
    for reader, exchange in enumerate(exchanges):
        for owner, shape in enumerate(exchange.shapes):
            assert list(exchanges[owner].pieces[reader].shape) == list(shape)
    return [exchange.result([other.pieces[rank] for other in exchanges]) for rank, exchange in enumerate(exchanges)]


# -- runs --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(readings())
def test_texts_and_lists_say_the_same(reading: Reading) -> None:
    found = from_text(reading.wanted)
    assert [tuple(elements(runs)) for runs in found] == list(reading.indices)
    assert [length(runs) for runs in found] == [len(each) for each in reading.indices]
    assert to_text(found) == reading.wanted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("_1 0:9|7:16 _1", [[None, *range(9)], [*range(7, 16), None]]),
        ("3:-1 1:2|5:6", [[3, 2, 1, 0, 1], [5]]),
        ("2:-1", [[2, 1, 0]]),
        ("_2", [[None, None]]),
    ],
)
def test_texts_as_they_are_written(text: str, expected: list[list[int | None]]) -> None:
    assert to_text(forward_runs(each) for each in expected) == text
    assert [elements(runs) for runs in from_text(text)] == expected


@pytest.mark.slow
@given(readings())
def test_segments_are_who_has_what(reading: Reading) -> None:
    """Every place of every reader is filled once, by the rank that has the element."""
    for runs, by_owner in zip(reading.indices, segments(reading.owned, reading.wanted), strict=True):
        found: list[int | None] = [None] * len(runs)
        for owner, copies in enumerate(by_owner):
            assert [copy.place for copy in copies] == sorted(copy.place for copy in copies)
            for copy in copies:
                own = range(copy.start, copy.start + copy.count)[:: copy.step]
                assert set(own) <= set(range(reading.owned[owner]))
                for offset, index in enumerate(own):
                    assert found[copy.place + offset] is None
                    found[copy.place + offset] = reading.starts[owner] + index
        assert tuple(found) == runs


@given(readings(), st.integers(0, 2))
def test_taking_and_its_adjoint(reading: Reading, dim: int) -> None:
    size = sum(reading.owned)
    x = whole_of(size, dim)
    for indices in reading.indices:
        runs = forward_runs(indices)
        taken = take_runs(x, dim, runs, FILL)
        assert torch.equal(taken, picked(x, dim, indices))
        assert taken.is_contiguous()
        gradient = whole_of(len(indices), dim) + 1
        put = put_runs(gradient, dim, runs, size)
        assert torch.equal(put, added(gradient, dim, indices, size))
        assert (take_runs(x, dim, runs, 0.0) * gradient).sum() == (x * put).sum()


def test_what_is_taken_is_new_memory() -> None:
    x = torch.zeros(4)
    take_runs(x, 0, (Run(0, 4),), 0.0).add_(1)
    assert not x.any()


# -- over ranks --------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(readings(), st.integers(0, 2))
def test_a_halo_exchange_is_gathering_and_taking(reading: Reading, dim: int) -> None:
    x = whole_of(sum(reading.owned), dim)
    halos = [Halo(dim, rank, reading.owned, reading.wanted) for rank in range(len(reading.owned))]
    exchanges = [halo.fetch(part, FILL) for halo, part in zip(halos, x.split(reading.owned, dim), strict=True)]
    for found, indices in zip(carried_out(exchanges), reading.indices, strict=True):
        assert torch.equal(found, picked(x, dim, indices))
        assert found.is_contiguous()


@given(readings(), st.integers(0, 2))
def test_a_halo_add_is_its_adjoint(reading: Reading, dim: int) -> None:
    size = sum(reading.owned)
    gradients = [whole_of(len(indices), dim) + rank for rank, indices in enumerate(reading.indices)]
    halos = [Halo(dim, rank, reading.owned, reading.wanted) for rank in range(len(reading.owned))]
    exchanges = [halo.give_back(gradient) for halo, gradient in zip(halos, gradients, strict=True)]
    total = sum(added(gradient, dim, indices, size) for gradient, indices in zip(gradients, reading.indices, strict=True))
    assert isinstance(total, Tensor)
    assert torch.equal(torch.cat(carried_out(exchanges), dim), total)


@given(readings())
def test_only_what_others_have_travels(reading: Reading) -> None:
    x = whole_of(sum(reading.owned), 1)
    halos = [Halo(1, rank, reading.owned, reading.wanted) for rank in range(len(reading.owned))]
    exchanges = [halo.fetch(part, FILL) for halo, part in zip(halos, x.split(reading.owned, 1), strict=True)]
    for rank, (exchange, indices) in enumerate(zip(exchanges, reading.indices, strict=True)):
        own = range(reading.starts[rank], reading.starts[rank] + reading.owned[rank])
        others = [index for index in indices if index is not None and index not in own]
        assert sum(shape[1] for shape in exchange.shapes) == len(others)
        assert exchange.pieces[rank].numel() == 0
