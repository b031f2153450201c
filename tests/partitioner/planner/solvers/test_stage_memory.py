"""Transient memory of stages, for known cuts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

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


def test_repeated_units_hold_values_of_their_own_copies() -> None:
    """Units 0 to 2, the block 1 and 2 twice: each copy of unit 2 holds the value that the copy of unit 1 before it makes."""
    values = RecomputedValues(np.array([1]), np.array([2]), np.array([3.0]))
    made, needed, size = values.repeated(np.array([0, 1, 2, 1, 2]))
    assert (made.tolist(), needed.tolist(), size.tolist()) == ([1, 3], [2, 4], [3.0, 3.0])
