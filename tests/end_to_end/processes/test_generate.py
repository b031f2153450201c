"""``pm.generate`` with a rank a process: every rank returns the tokens of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.processes import module_cases as cases
from tests.support.processes.processes import Workers

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("pipeline", 2),
        ("tensor", 2),
        ({"pipeline": 2, "tensor": 2}, 4),
    ],
    ids=str,
)
def test_every_rank_has_the_tokens(workers: Callable[[int], Workers], mode: Any, size: int) -> None:
    for equal, refusal in workers(size).values(cases.generated, mode, timeout=350):
        assert equal
        assert refusal.startswith("do_sample=True draws in every process")
