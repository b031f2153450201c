"""Transient memory of stages, for known cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from partitioner.planner.solvers.stage_memory import RecomputedValues, TransientMemory

BACKWARD = 3
"""The row of whole backwards in ``by_action``."""

VALUES = RecomputedValues(np.array([0, 2]), np.array([2, 3]), np.array([5.0, 7.0]))


def test_a_stage_does_not_compute_values_of_earlier_stages_again() -> None:
    """Unit 0 makes a value that units 1 and 2 hold, and unit 2 one that unit 3 holds: a cut in between takes them from later units."""
    assert VALUES.of_earlier_stages([0], 4).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert VALUES.of_earlier_stages([0, 1], 4).tolist() == [0.0, 5.0, 5.0, 0.0]
    assert VALUES.of_earlier_stages([0, 2, 3], 4).tolist() == [0.0, 0.0, 5.0, 7.0]
    backward = np.array([9.0, 9.0, 9.0, 9.0])
    memory = replace(TransientMemory.nothing(4), backward=backward, inputs=backward, recomputed=VALUES)
    assert memory.by_action([0, 1])[BACKWARD].tolist() == [9.0, 9.0]  # unit 3 holds none of them
    assert memory.by_action([0, 2, 3])[BACKWARD].tolist() == [9.0, 4.0, 2.0]


@pytest.mark.parametrize("seed", range(5))
def test_runs_of_a_block_hold_what_stages_of_these_cuts_do(seed: int) -> None:
    draw = np.random.default_rng(seed)
    made = draw.integers(0, 9, 12)
    values = RecomputedValues(made, np.minimum(made + draw.integers(1, 6, 12), 9), draw.integers(1, 9, 12).astype(float))
    memory = replace(TransientMemory.nothing(10), backward=np.full(10, 99.0), recomputed=values)
    for start, width in itertools.product(range(1, 10), (1, 3)):
        (held,) = values.of_block(start, start + 1, width).tolist()
        of_stages = values.of_earlier_stages([0, start], 10)
        assert held[: 10 - start] == of_stages[start : start + width].tolist()
        assert values.of_block(0, 10, width)[start].tolist() == held
        if start + width < 10:
            assert memory.of_block(start, start + 1, width)[0, -1] == memory.of_stages([0, start, start + width])[1]


def test_repeated_units_hold_values_of_their_own_copies() -> None:
    """Units 0 to 2, the block 1 and 2 twice: each copy of unit 2 holds the value that the copy of unit 1 before it makes."""
    values = RecomputedValues(np.array([1]), np.array([2]), np.array([3.0]))
    made, needed, size = values.repeated(np.array([0, 1, 2, 1, 2]))
    assert (made.tolist(), needed.tolist(), size.tolist()) == ([1, 3], [2, 4], [3.0, 3.0])
