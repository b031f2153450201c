"""Runs: the elements of a sharded dimension that each rank of a group reads, in order, its own and those of other ranks.

A dimension of 16 is sharded over two ranks, eight elements each. A window of three with a padding of one at both ends reads

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


@dataclass(frozen=True)
class Run:
    """Consecutive elements.

    Attributes:
        start: the first one.
        count: how many.
        step: 1; -1 backwards; 0: elements of padding, whose ``start`` is 0.
    """

    start: int
    count: int
    step: int = 1

    def __str__(self) -> str:
        return f"_{self.count}" if self.step == 0 else f"{self.start}:{self.start + self.step * self.count}"


Runs: TypeAlias = tuple[Run, ...]
"""The elements that one rank reads, in order."""


def length(runs: Iterable[Run]) -> int:
    """Return the total number of elements."""
    return sum(run.count for run in runs)


def forward_runs(indices: Iterable[int | None]) -> Runs:
    """Compress a list of element indices into runs; None is padding.

    >>> [str(run) for run in forward_runs([None, 0, 1, 2, 1])]
    ['_1', '0:3', '1:2']
    """
    runs: list[Run] = []
    for index in indices:
        last = runs[-1] if runs else None
        step = None if last is None else _step_to(last, index)
        if last is None or step is None:
            runs.append(Run(0, 1, 0) if index is None else Run(index, 1))
        else:
            runs[-1] = Run(last.start, last.count + 1, step)
    return tuple(runs)


def _step_to(run: Run, index: int | None) -> int | None:
    """Return the step of a run that an element (None: padding) extends; None if it starts a new run."""
    if index is None or run.step == 0:
        return 0 if index is None and run.step == 0 else None
    if run.count == 1:
        return index - run.start if abs(index - run.start) == 1 else None
    return run.step if index == run.start + run.step * run.count else None


@functools.cache
def from_text(text: str) -> tuple[Runs, ...]:
    """Parse the runs of each rank: ``"_1 0:9|7:16 _1"``."""
    return tuple(tuple(_parse_run(word) for word in part.split()) for part in text.split("|"))


def _parse_run(word: str) -> Run:
    """Parse one run: ``"0:9"``, backwards ``"5:2"``, or padding ``"_2"``."""
    if word.startswith("_"):
        return Run(0, int(word[1:]), 0)
    start, stop = (int(number) for number in word.split(":"))
    return Run(start, abs(stop - start), 1 if stop >= start else -1)


def to_text(wanted: Iterable[Runs]) -> str:
    """Format the runs of each rank: the inverse of ``from_text``."""
    return "|".join(" ".join(str(run) for run in runs) for runs in wanted)


@dataclass(frozen=True)
class Copy:
    """Consecutive elements of an owner rank that a reader rank (perhaps the same) copies.

    Attributes:
        start: the smallest index, counted among the owner's elements, also if the step is -1.
        count: how many.
        step: 1, or -1: copied in reverse order.
        place: index of the first copied element in the reader's result.
    """

    start: int
    count: int
    step: int
    place: int


Segment: TypeAlias = tuple[Copy, ...]
"""All copies from one rank to another, in the order of their places."""


@functools.cache
def segments(owned: tuple[int, ...], wanted: str) -> tuple[tuple[Segment, ...], ...]:
    """Return the copies between all ranks, as ``[reader][owner]``.

    Args:
        owned: number of elements of each rank, in order.
        wanted: the runs that each rank reads, as text.
    """
    starts = [sum(owned[:rank]) for rank in range(len(owned))]
    of_readers = []
    for runs in from_text(wanted):
        by_owner: list[list[Copy]] = [[] for _ in owned]
        place = 0
        for run in runs:
            for owner, copy in _copies_of_run(run, place, starts, owned):
                by_owner[owner].append(copy)
            place += run.count
        of_readers.append(tuple(tuple(copies) for copies in by_owner))
    return tuple(of_readers)


def largest_message(owned: tuple[int, ...], wanted: str) -> int:
    """Return the most elements that one rank sends another; arguments as for ``segments``."""
    messages = (
        sum(copy.count for copy in copies)
        for reader, by_owner in enumerate(segments(owned, wanted))
        for owner, copies in enumerate(by_owner)
        if reader != owner
    )
    return max(messages, default=0)


def _copies_of_run(run: Run, place: int, starts: Sequence[int], owned: Sequence[int]) -> Iterator[tuple[int, Copy]]:
    """Yield the owners of a run's elements, each with its copy; ``starts`` has the index of the first element of each rank."""
    if run.step == 0:
        return
    first = run.start if run.step == 1 else run.start - run.count + 1
    last = first + run.count
    for owner, (start, size) in enumerate(zip(starts, owned, strict=True)):
        low, high = max(first, start), min(last, start + size)
        if low < high:
            offset = low - first if run.step == 1 else last - high
            yield owner, Copy(low - start, high - low, run.step, place + offset)


def take_runs(x: Tensor, dim: int, runs: Runs, fill: float) -> Tensor:
    """Return the elements of runs, one after another, in new memory; padding has the value ``fill``."""
    if len(runs) == 1 and runs[0].step == 1:
        return x.narrow(dim, runs[0].start, runs[0].count).clone(memory_format=torch.contiguous_format)
    return torch.cat([_take_run(x, dim, run, fill) for run in runs], dim).contiguous()


def _take_run(x: Tensor, dim: int, run: Run, fill: float) -> Tensor:
    if run.step == 0:
        return _filled(x, dim, run.count, fill)
    if run.step == 1:
        return x.narrow(dim, run.start, run.count)
    return x.narrow(dim, run.start - run.count + 1, run.count).flip(dim)


def put_runs(grad: Tensor, dim: int, runs: Runs, size: int) -> Tensor:
    """Return the gradient of ``take_runs``: for each of the ``size`` elements, the sum of the gradients of its copies."""
    copies, place = [], 0
    for run in runs:
        if run.step:
            copies.append(Copy(run.start if run.step == 1 else run.start - run.count + 1, run.count, run.step, place))
        place += run.count
    return put_copies(grad, dim, copies, size)


def put_copies(grad: Tensor, dim: int, copies: Sequence[Copy], size: int) -> Tensor:
    """Return the gradient of an owner's elements from the gradient of one reader, in new memory.

    Args:
        grad: of the reader's result, each copy in its place.
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
    # No element was read twice or in reverse: concatenate the gradients of the copies, with zeros for elements that were not read.
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
