"""Checkpoints over real processes, by ``torch.distributed.checkpoint``: any plan loads any other's, and so does FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import checkpoint_cases as cases
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import slow

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(180)]


@pytest.mark.parametrize("mode", slow("fsdp", "pipeline", "tensor", "data"))
def test_options(workers: Callable[[int], Workers], mode: str) -> None:
    assert workers(2).values(cases.option_problems, mode, timeout=120) == [[]] * 2


@pytest.mark.parametrize(
    ("saved", "loaded", "size"),
    [
        pytest.param("tensor", "pipeline", 2, marks=pytest.mark.slow),
        pytest.param("pipeline", "fsdp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp", "tensor", 2, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "fsdp": 2}, {"data": 2, "tensor": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_under_another_plan(workers: Callable[[int], Workers], saved: Any, loaded: Any, size: int, tmp_path: Path) -> None:
    assert workers(size).values(cases.resumed_problems, saved, loaded, str(tmp_path), timeout=170) == [[]] * size


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        pytest.param("tensor", 2, marks=pytest.mark.slow),
        pytest.param("pipeline", 2, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tensor": 2}, 4, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "fsdp": 2}, 4, marks=pytest.mark.slow),
        pytest.param({"pipeline": (2, 1)}, 3, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "tensor": (2, 1)}, 3, marks=pytest.mark.slow),
        pytest.param("fsdp", 3, marks=pytest.mark.slow),
    ],
)
def test_dtensors(workers: Callable[[int], Workers], mode: Any, size: int, tmp_path: Path) -> None:
    assert workers(size).values(cases.dtensor_problems, mode, str(tmp_path), timeout=170) == [[]] * size


@pytest.mark.slow
def test_fsdp2(workers: Callable[[int], Workers], tmp_path: Path) -> None:
    assert workers(2).values(cases.fsdp2_problems, str(tmp_path), timeout=120) == [[]] * 2


@pytest.mark.slow
def test_a_rank_without_parameters(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(cases.idle_rank_problems, timeout=120) == [[]] * 2
