"""The Pareto front of placements: rows that no other row beats in all numbers at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partitioner.experiments.results.row import Row


def numbers_of_front(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the numbers by which rows are compared: time, memory, and the price of a step if each row has one."""
    priced = [row.step_cost is not None for row in rows]
    return ("step_time", "peak_memory", "step_cost") if priced and all(priced) else ("step_time", "peak_memory")


def pareto_front(rows: Iterable[Row], numbers: Sequence[str]) -> list[Row]:
    """Return the rows for which no other row is as good in all of these numbers, fastest first; of equal rows, one.

    Args:
        rows: placements of one model that did not fail.
        numbers: names of fields of which smaller is better.
    """

    def values(row: Row) -> tuple[float, ...]:
        return tuple(getattr(row, name) for name in numbers)

    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (*values(row), row.key)):  # a row is only beaten by one before it
        if not any(all(one <= own for one, own in zip(values(better), values(row), strict=True)) for better in front):
            front.append(row)
    return sorted(front, key=lambda row: (row.step_time or 0.0, row.key))
