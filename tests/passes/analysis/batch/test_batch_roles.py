"""Position of the batch after any sequence of views: the rules against brute force over the row that each element came from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from passes.analysis.batch_roles import Rows
from passes.analysis.batch_semantics import result_roles
from passes.ir.tensor_spec import TensorSpec
from passes.rules.call import Call, Shape

aten = torch.ops.aten
BATCH = sympy.Symbol("batch", positive=True, integer=True)
SIZES = (5, 7)
"""Batch sizes that divide nothing else."""

Step = tuple[str, Any]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Shape, int, list[Step]]:
    """Return a shape with the batch in one dimension, and steps: reshapes to shapes of as many elements, and permutations."""
    factors = draw(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=3))
    shape, dimension = draw(_arranged(factors, True))
    rank, steps = len(shape), []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            target, _ = draw(_arranged(factors, draw(st.booleans())))
            steps.append(("reshape", target))
            rank = len(target)
        else:
            steps.append(("permute", tuple(draw(st.permutations(range(rank))))))
    return shape, dimension, steps


@st.composite
def _arranged(draw: st.DrawFn, factors: list[int], alone: bool) -> tuple[Shape, int]:
    """Return the factors, some multiplied together, with the batch as one dimension or within one."""
    sizes: list[Any] = []
    for factor in draw(st.permutations(factors)):
        merges: bool = draw(st.booleans())
        if sizes and merges:
            sizes[-1] *= factor
        else:
            sizes.append(factor)
    place = draw(st.integers(0, len(sizes) if alone else len(sizes) - 1))
    if alone:
        sizes.insert(place, BATCH)
    else:
        sizes[place] = sizes[place] * BATCH
    return tuple(sizes), place


def run_rules(shape: Shape, dimension: int, steps: Sequence[Step]) -> Rows | None:
    """Return the batch's place after the steps; None when rows are mixed."""
    role = Rows(dimension)
    for kind, argument in steps:
        after = argument if kind == "reshape" else tuple(shape[index] for index in argument)
        operator, name = (aten.view.default, "size") if kind == "reshape" else (aten.permute.default, "dims")
        values = (("self", TensorSpec(shape, torch.float32)), (name, argument))
        found = result_roles(Call.numbered(operator, values, (TensorSpec(after, torch.float32),)), [role], BATCH)
        if found is None:
            return None
        assert isinstance(found[0], Rows)
        role, shape = found[0], after
    return role


def run_tensors(shape: Shape, dimension: int, steps: Sequence[Step], batch: int) -> Tensor:
    """Return, for each element at the end, the row that it came from."""

    def concrete(sizes: Shape) -> list[int]:
        return [int(sympy.sympify(size).subs(BATCH, batch)) for size in sizes]

    view = [batch if index == dimension else 1 for index in range(len(shape))]
    rows = torch.arange(batch).view(view).expand(concrete(shape))
    for kind, argument in steps:
        rows = rows.reshape(concrete(argument)) if kind == "reshape" else rows.permute(argument)
    return rows


def places(rows: Tensor, batch: int) -> Iterator[tuple[int, int]]:
    """Yield every dimension, with the number of blocks before the batch in it, where rows count up as a role says."""
    for dimension, size in enumerate(rows.shape):
        for before in range(1, size // batch + 1):
            if size % (before * batch) == 0:
                behind = size // (before * batch)
                expected = torch.arange(size) // behind % batch
                shape = [size if index == dimension else 1 for index in range(rows.ndim)]
                if torch.equal(rows, expected.view(shape).expand_as(rows)):
                    yield dimension, before


@pytest.mark.slow
@settings(max_examples=400)
@given(sequences())
def test_views(sequence: tuple[Shape, int, list[Step]]) -> None:
    shape, dimension, steps = sequence
    role = run_rules(shape, dimension, steps)
    found = [set(places(run_tensors(shape, dimension, steps, batch), batch)) for batch in SIZES]
    if role is not None:
        assert all((role.dimension, role.before) in each for each in found)
    else:
        assert _mixes_on_the_way(shape, dimension, steps)


def _mixes_on_the_way(shape: Shape, dimension: int, steps: Sequence[Step]) -> bool:
    """Return whether, after some step, no dimension holds the batch."""

    def held(count: int) -> set[tuple[int, int]]:
        return set.intersection(*(set(places(run_tensors(shape, dimension, steps[:count], batch), batch)) for batch in SIZES))

    return any(not held(count) for count in range(1, len(steps) + 1))


def test_the_strategy_meets_both() -> None:
    """A batch kept inside a merged dimension, and one that is lost."""
    assert run_rules((3, BATCH), 1, [("reshape", (3 * BATCH,))]) == Rows(0, 3)
    assert run_rules((3, BATCH), 1, [("reshape", (BATCH, 3))]) is None
    assert math.prod(run_tensors((3, BATCH), 1, [("reshape", (3 * BATCH,))], 5).shape) == 15
