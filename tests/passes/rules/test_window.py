"""Windows of a part of a result, compared with the elements whose change changes that part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from passes.ir.comm.index_ranges import Runs
from passes.rules.loops import Loops
from passes.rules.registry import loops_of
from passes.rules.validate import call_node
from passes.rules.window import STEP, Reach, Window, through
from tests.support.samples.rule_samples_values import Sample, real

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Windowed:
    """A call whose loops slide.

    Attributes:
        call: the operation and its arguments; the first is what it slides over.
        is_tight: whether a part reads no element that it does not depend on.
    """

    call: Sample
    is_tight: bool = True

    @property
    def operand(self) -> Tensor:
        found = self.call.args[0]
        assert isinstance(found, Tensor)
        return found

    def result(self, x: Tensor) -> Tensor:
        found = self.call.operator(x, *self.call.args[1:], **self.call.kwargs)
        assert isinstance(found, Tensor)
        return found

    @property
    def loops(self) -> Loops:
        found = loops_of(call_node(self.call.operator, *self.call.args, **self.call.kwargs))
        assert found is not None
        return found


def cases() -> Iterator[Windowed]:
    yield from convolutions()
    yield from pools()
    yield from interpolations()
    yield from moves()


def convolutions() -> Iterator[Windowed]:
    for kernel, stride, padding, dilation in itertools.product((1, 2, 3), (1, 2, 3), (0, 1, 2), (1, 2)):
        is_tight = stride <= kernel and dilation == 1  # else there are gaps between what it reads
        yield Windowed(Sample(aten.conv1d.default, real(1, 1, 11), real(1, 1, kernel), None, [stride], [padding], [dilation]), is_tight)
        if padding <= dilation * (kernel - 1):
            sizes = ([stride], [padding], [0], 1, [dilation])
            yield Windowed(Sample(aten.conv_transpose1d.default, real(1, 1, 7), real(1, 1, kernel), None, *sizes), is_tight)
    yield Windowed(Sample(aten.conv2d.default, real(1, 1, 8, 7), real(1, 1, 3, 2), None, [2, 1], [1, 0]))
    yield Windowed(Sample(aten.conv2d.padding, real(1, 1, 8, 7), real(1, 1, 3, 5), None, [1, 1], "same"))
    yield Windowed(Sample(aten.conv3d.default, real(1, 1, 5, 6, 7), real(1, 1, 3, 2, 1), None, [1, 2, 1], [1, 1, 0]))


def pools() -> Iterator[Windowed]:
    for kernel, stride, ceil in itertools.product((2, 3), (1, 2, 3), (False, True)):
        for padding in range(kernel // 2 + 1):
            args = ([kernel], [stride], [padding])
            yield Windowed(Sample(aten.max_pool1d.default, real(1, 1, 10), *args, [1], ceil), stride <= kernel)
            yield Windowed(Sample(aten.avg_pool1d.default, real(1, 1, 10), *args, ceil), stride <= kernel)
    yield Windowed(Sample(aten.max_pool2d.default, real(1, 1, 9, 8), [3, 2], [1, 2], [1, 0], [2, 1]), is_tight=False)
    for size in (1, 2, 3, 5, 7, 10, 12):
        yield Windowed(Sample(aten.adaptive_avg_pool1d.default, real(1, 1, 10), [size]))


def interpolations() -> Iterator[Windowed]:
    for size, corners in itertools.product((3, 5, 7, 10, 14, 17, 21), (False, True)):
        yield Windowed(Sample(aten.upsample_linear1d.vec, real(1, 1, 7), [size], corners, None), is_tight=False)
        yield Windowed(Sample(aten.upsample_bicubic2d.vec, real(1, 1, 7, 5), [size, 8], corners, None), is_tight=False)
    for size in (3, 5, 7, 10, 14, 17, 21):
        is_whole = size % 7 == 0
        yield Windowed(Sample(aten.upsample_nearest1d.vec, real(1, 1, 7), [size], None), is_whole)
        yield Windowed(Sample(aten._upsample_nearest_exact1d.vec, real(1, 1, 7), [size], None), is_whole)
    for factor in (0.5, 0.7, 1.5, 2.3, 2.0):
        yield Windowed(Sample(aten.upsample_linear1d.vec, real(1, 1, 9), None, False, [factor]), is_tight=False)
        yield Windowed(Sample(aten.upsample_nearest1d.vec, real(1, 1, 9), None, [factor]), factor == 2.0)


def moves() -> Iterator[Windowed]:
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield Windowed(Sample(aten.pad.default, real(1, 1, 7, 6), [2, 3, 1, 4], mode))
    yield Windowed(Sample(aten.pad.default, real(7, 6), [-1, 2, 1, -2]))
    yield Windowed(Sample(aten.flip.default, real(5, 6), [0, 1]))
    yield Windowed(Sample(aten.roll.default, real(5, 6), [2, -8], [0, 1]))
    yield Windowed(Sample(aten.slice.Tensor, real(9, 2), 0, 2, 8, 1))
    yield Windowed(Sample(aten.slice.Tensor, real(9, 2), 0, 1, 9, 3), is_tight=False)
    for size, step in ((2, 1), (3, 2), (2, 3)):
        yield Windowed(Sample(aten.unfold.default, real(9, 2), 0, size, step), step <= size)


CASES = list(cases())


def depends_on(case: Windowed, window: Window) -> dict[int, set[int]]:
    """Step -> the elements of the operand's dimension that change the result there when they change."""
    x, loops = case.operand, case.loops
    dim = next(place for place, factors in enumerate(loops.results[0]) if window.factor in factors)
    expected, found = case.result(x), {}
    for step in range(expected.shape[dim]):
        found[step] = {
            element
            for element in range(x.shape[window.dimension])
            if not torch.equal(case.result(_raised(x, window.dimension, element)).select(dim, step), expected.select(dim, step))
        }
    return found


def _raised(x: Tensor, dim: int, element: int) -> Tensor:
    """Return a tensor raised so much that the element is the maximum of every window that has it."""
    changed = x.clone()
    changed.select(dim, element).add_(100.0)
    return changed


def read(runs: Runs) -> set[int]:
    """Return the elements, without padding."""
    return {run.start + run.step * offset for run in runs if run.step for offset in range(run.count)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case.call))
def test_parts_read_what_they_depend_on(case: Windowed) -> None:
    windows = [window for window in case.loops.windows if window.factor is not None]
    for window in windows:
        needed = depends_on(case, window)
        for start, stop in itertools.combinations(range(len(needed) + 1), 2):
            runs = read(window.reach.reads(start, stop))
            truth = set().union(*(needed[step] for step in range(start, stop)))
            assert truth <= runs
            assert runs <= set(range(window.reach.size))
            if case.is_tight:
                assert runs == truth, (start, stop)


@pytest.mark.slow
def test_the_table_has_every_kind_of_border() -> None:
    borders = {window.reach.border for case in CASES for window in case.loops.windows}
    assert borders == {"fill", "clamp", "replicate", "reflect", "circular"}


def test_what_does_not_slide_has_no_windows() -> None:
    """A kernel of one is a window, too: it reads one element."""
    assert not Windowed(Sample(aten.relu.default, real(2, 3))).loops.windows
    assert not Windowed(Sample(aten.adaptive_avg_pool2d.default, real(1, 1, 4, 4), [1, 1])).loops.windows


# -- chains ------------------------------------------------------------------------------------------------------------------------

Layer = tuple[int, int, int]
"""Kernel, stride and padding of a convolution without gaps; of a kernel of 0, by how much the nearest neighbours are multiplied."""


def layers() -> st.SearchStrategy[Layer]:
    sliding = st.integers(1, 3).flatmap(lambda kernel: st.tuples(st.just(kernel), st.integers(1, kernel), st.integers(0, kernel - 1)))
    return st.one_of(sliding, st.tuples(st.just(0), st.integers(2, 3), st.just(0)))


@settings(max_examples=40)
@given(st.lists(layers(), min_size=1, max_size=3), st.data())
def test_formulas_of_a_chain_are_composed(chain: list[Layer], data: st.DataObject) -> None:
    """Far from the ends, the composed formulas are the first and last element that an interval of the last result depends on."""
    x = torch.rand(1, 1, 40, dtype=torch.float64, requires_grad=True)
    y, reaches = x, []
    for kernel, stride, padding in chain:
        size = y.shape[-1]
        assume(size + 2 * padding >= kernel)
        if kernel:
            reaches.append(Reach(stride * STEP - padding, stride * STEP - padding + kernel - 1, size))
            y = F.conv1d(y, torch.rand(1, 1, kernel, dtype=torch.float64) + 1, stride=stride, padding=padding)
        else:
            reaches.append(Reach(STEP // stride, STEP // stride, size))
            y = F.interpolate(y, scale_factor=float(stride))
    start = data.draw(st.integers(0, y.shape[-1] - 1))
    stop = data.draw(st.integers(start + 1, min(y.shape[-1], start + 4)))
    first, last = through(reaches)
    begin, end = int(first.subs(STEP, start)), int(last.subs(STEP, stop - 1))
    assume(begin >= 0 and end < 40 and _stays_inside(reaches, start, stop - 1))
    (gradient,) = torch.autograd.grad(y[..., start:stop].sum(), x)
    touched = gradient.flatten().nonzero().flatten().tolist()
    assert (touched[0], touched[-1]) == (begin, end)


def _stays_inside(reaches: list[Reach], first: int, last: int) -> bool:
    for reach in reversed(reaches):
        first, last = int(reach.first.subs(STEP, first)), int(reach.last.subs(STEP, last))
        if first < 0 or last >= reach.size:
            return False
    return True
