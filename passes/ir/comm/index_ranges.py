"""Runs: which elements of a dimension each rank of a group reads, in which order, whoever has them.

A dimension of 16 lies over two ranks, eight elements each. A window of three with a padding of one at both ends reads

    rank 0   _1 0:9         one element of padding, then 0..8: the last one is the neighbour's
    rank 1   7:16 _1        7 is the neighbour's

As text, ranks are divided by bars: ``"_1 0:9|7:16 _1"``. A run is ``start:stop``; backwards (``5:2`` is 5, 4, 3), as reflections read;
or so many elements of padding, ``_2``. Elements may be read by several ranks, and more than once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Copy",
    "Run",
    "Runs",
    "Segment",
    "forward_runs",
    "from_text",
    "length",
    "put_copies",
    "put_runs",
    "segments",
    "take_runs",
    "to_text",
]


@dataclass(frozen=True)
class Run:
    """Consecutive elements.

    Attributes:
        start: the first one.
        count: how many.
        step: 1; -1 backwards; 0: elements of padding, which nobody has.
    """

    start: int
    count: int
    step: int = 1

    def __str__(self) -> str:
        return f"_{self.count}" if self.step == 0 else f"{self.start}:{self.start + self.step * self.count}"


Runs: TypeAlias = tuple[Run, ...]
"""What one rank reads, in order."""


def length(runs: Iterable[Run]) -> int:
    """How many elements runs have together."""
    return sum(run.count for run in runs)


def forward_runs(indices: Iterable[int | None]) -> Runs:
    """The runs of a list of elements; None is padding.

    >>> [str(run) for run in forward_runs([None, 0, 1, 2, 1])]
    ['_1', '0:3', '1:2']
    """
    found: list[Run] = []
    for index in indices:
        last = found[-1] if found else None
        if index is None:
            step = 0 if last is not None and last.step == 0 else None
        else:
            step = _continues(last, index) if last is not None else None
        if last is None or step is None:
            found.append(Run(0, 1, 0) if index is None else Run(index, 1))
        else:
            found[-1] = Run(last.start, last.count + 1, step)
    return tuple(found)


def _continues(run: Run, index: int) -> int | None:
    """The step by which an element continues a run; None when it does not."""
    if run.step == 0:
        return None
    if run.count == 1:
        return index - run.start if abs(index - run.start) == 1 else None
    return run.step if index == run.start + run.step * run.count else None


@functools.cache
def from_text(text: str) -> tuple[Runs, ...]:
    """What each rank reads."""
    return tuple(tuple(_run(word) for word in part.split()) for part in text.split("|"))


def _run(word: str) -> Run:
    if word.startswith("_"):
        return Run(0, int(word[1:]), 0)
    start, stop = (int(number) for number in word.split(":"))
    return Run(start, abs(stop - start), 1 if stop >= start else -1)


def to_text(wanted: Iterable[Runs]) -> str:
    """The inverse of ``from_text``."""
    return "|".join(" ".join(str(run) for run in runs) for runs in wanted)


# -- who has what ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """Consecutive elements of one rank, for another or for itself.

    Attributes:
        start: the first, of the rank's own elements, in ascending order whatever the step.
        count: how many.
        step: 1, or -1: read backwards.
        place: where the first stands in what the reader makes.
    """

    start: int
    count: int
    step: int
    place: int


Segment: TypeAlias = tuple[Copy, ...]
"""All copies from one rank to one other, in the order of their places."""


@functools.cache
def segments(owned: tuple[int, ...], wanted: str) -> tuple[tuple[Segment, ...], ...]:
    """``[reader][owner]``: what is copied.

    Args:
        owned: how many elements each rank has, in order.
        wanted: what each reads.
    """
    starts = [sum(owned[:rank]) for rank in range(len(owned))]
    found = []
    for runs in from_text(wanted):
        by_owner: list[list[Copy]] = [[] for _ in owned]
        place = 0
        for run in runs:
            for owner, copy in _owners(run, place, starts, owned):
                by_owner[owner].append(copy)
            place += run.count
        found.append(tuple(tuple(copies) for copies in by_owner))
    return tuple(found)


def _owners(run: Run, place: int, starts: Sequence[int], owned: Sequence[int]) -> Iterator[tuple[int, Copy]]:
    """Who has the elements of a run."""
    if run.step == 0:
        return
    first = run.start if run.step == 1 else run.start - run.count + 1
    last = first + run.count
    for owner, (start, size) in enumerate(zip(starts, owned, strict=True)):
        low, high = max(first, start), min(last, start + size)
        if low < high:
            offset = low - first if run.step == 1 else last - high
            yield owner, Copy(low - start, high - low, run.step, place + offset)


# -- on one rank -----------------------------------------------------------------------------------------------------------------------


def take_runs(x: Tensor, dim: int, runs: Runs, fill: float) -> Tensor:
    """The elements of runs, one after another, in new memory.

    Args:
        fill: what padding holds.
    """
    if len(runs) == 1 and runs[0].step == 1:
        return x.narrow(dim, runs[0].start, runs[0].count).clone(memory_format=torch.contiguous_format)
    return torch.cat([_taken(x, dim, run, fill) for run in runs], dim).contiguous()


def _taken(x: Tensor, dim: int, run: Run, fill: float) -> Tensor:
    if run.step == 0:
        return _filled(x, dim, run.count, fill)
    if run.step == 1:
        return x.narrow(dim, run.start, run.count)
    return x.narrow(dim, run.start - run.count + 1, run.count).flip(dim)


def put_runs(grad: Tensor, dim: int, runs: Runs, size: int) -> Tensor:
    """The gradient of ``take_runs``: every element's readers added.

    Args:
        size: of the dimension that was read.
    """
    copies, place = [], 0
    for run in runs:
        if run.step:
            copies.append(Copy(run.start if run.step == 1 else run.start - run.count + 1, run.count, run.step, place))
        place += run.count
    return put_copies(grad, dim, copies, size)


def put_copies(grad: Tensor, dim: int, copies: Sequence[Copy], size: int) -> Tensor:
    """The gradients of what one rank read of one other, or of itself, added at the owner's elements, in new memory.

    Args:
        grad: of what was read, each copy in its place.
        size: how many elements the owner has.
    """
    ordered = sorted(copies, key=lambda copy: copy.start)
    ends = [0, *(copy.start + copy.count for copy in ordered)]
    if any(copy.step == -1 or copy.start < end for copy, end in zip(ordered, ends, strict=False)):
        whole = _filled(grad, dim, size)
        for copy in copies:
            piece = grad.narrow(dim, copy.place, copy.count)
            whole.narrow(dim, copy.start, copy.count).add_(piece if copy.step == 1 else piece.flip(dim))
        return whole
    # No element was read twice: the gradient is what was read, moved, and zeros where nobody read.
    pieces = []
    for copy, end in zip(ordered, ends, strict=False):
        pieces += [_filled(grad, dim, copy.start - end)] if copy.start > end else []
        pieces.append(grad.narrow(dim, copy.place, copy.count))
    pieces += [_filled(grad, dim, size - ends[-1])] if size > ends[-1] or not pieces else []
    return torch.cat(pieces, dim).contiguous() if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def _filled(like: Tensor, dim: int, size: int, fill: float = 0.0) -> Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return like.new_full(shape, fill)
