"""Lifetimes of values along an order, and what is held at each place of it."""

from __future__ import annotations

from passes.analysis.lifetimes import Lifetime, held_at, lifetimes


def test_a_value_lives_from_its_first_place_to_its_last() -> None:
    assert lifetimes([("x",), ("y", "x"), (), ("z", "y")]) == {"x": Lifetime(0, 1), "y": Lifetime(1, 3), "z": Lifetime(3, 3)}


def test_what_is_held_is_what_lives() -> None:
    sizes = [(Lifetime(0, 1), 5), (Lifetime(1, 3), 8), (Lifetime(3, 3), 1)]
    assert held_at(4, sizes) == [sum(size for life, size in sizes if life.first <= place <= life.last) for place in range(4)]
    assert held_at(2, []) == [0, 0]
