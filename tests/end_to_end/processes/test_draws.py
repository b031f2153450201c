"""Processes draw the random numbers of one device, whatever their seeds, and so do all ranks of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.end_to_end.processes import draw_cases as cases
from tests.support.processes.processes import Workers

CASES = [
    ("dropout", "pipeline", "alike", {"n_microbatches": 3}, False),
    ("distributions", "model", "by rank", {}, True),
    ("noisy loss", "model", "by rank", {}, False),
    ("attention", "model", "alike", {}, True),
    ("attention", "pipeline", "by rank", {"n_microbatches": 2, "recompute": "full"}, False),
    ("distributions", "pipeline", "by rank", {"n_microbatches": 3, "schedule": "Interleaved1F1B", "stages_per_device": 2}, False),
    ("dropout", "pipeline", "alike", {"n_microbatches": 2, "schedule": "ZBV", "stages_per_device": 2}, False),
    ("attention", {"tensor": 2}, "by rank", {}, True),
    ("attention", {"data": 2}, "by rank", {}, True),
    ("dropout", {"fsdp": 2}, "alike", {}, False),
]
QUICK = {"processes": (0,), "one process": (5,)}


def some(quick: tuple[int, ...]) -> list[Any]:
    """Return the cases; all but those at the quick places are slow."""
    marks = [() if place in quick else (pytest.mark.slow,) for place in range(len(CASES))]
    return [pytest.param(*case, marks=mark, id=f"{case[0]}-{case[1]}") for case, mark in zip(CASES, marks, strict=True)]


@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("kind", "mode", "seeds", "options", "by_hand"), some(QUICK["processes"]))
def test_processes(
    workers: Callable[[int], Workers], kind: str, mode: cases.Mode, seeds: str, options: dict[str, Any], *, by_hand: bool
) -> None:
    for differences in workers(2).values(cases.differences, kind, mode, seeds, options, by_hand, timeout=120):
        assert max(differences) < 1e-12, differences


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["dropout", "attention"])
@pytest.mark.parametrize("mode", [{"data": 2, "pipeline": 2}, {"pipeline": (2, 1, 1)}], ids=str)
def test_four_processes(workers: Callable[[int], Workers], kind: str, mode: cases.Mode) -> None:
    options = {"n_microbatches": 2} if "data" not in mode else {"n_microbatches": 1}
    for differences in workers(4).values(cases.differences, kind, mode, "by rank", options, False, timeout=120):
        assert max(differences) < 1e-12, differences


@pytest.mark.parametrize(("kind", "mode", "seeds", "options", "by_hand"), some(QUICK["one process"]))
def test_one_process(kind: str, mode: cases.Mode, seeds: str, options: dict[str, Any], *, by_hand: bool) -> None:
    differences = cases.differences(kind, mode, seeds, options, by_hand)
    assert max(differences) < 1e-12, differences
