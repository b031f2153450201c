"""Partitioned models of the tests of losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from partitioner import PartitionedModel, partition
from tests.support.processes import loss_cases as cases
from tests.support.processes.loss_cases import labelled

MODES: dict[str, dict[str, Any]] = {
    "pipeline": {"devices": 2, "mode": "pipeline", "n_microbatches": 3, "schedule": "1F1B"},
    "data": {"devices": 2, "mode": "data"},
    "mesh": {"devices": 4, "mode": {"fsdp": 2, "pipeline": 2}, "n_microbatches": 2},
}


def partitioned(**options: Any) -> PartitionedModel:
    return partition(cases.model(), example_inputs=(labelled()[0],), **options)


@pytest.fixture(scope="module", params=["pipeline", "data", pytest.param("mesh", marks=pytest.mark.slow)])
def pm(request: pytest.FixtureRequest) -> PartitionedModel:
    return partitioned(**MODES[request.param])


@pytest.fixture(scope="module")
def pipeline() -> PartitionedModel:
    return partitioned(**MODES["pipeline"])


@pytest.fixture(autouse=True)
def _without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"pm", "pipeline"} & set(request.fixturenames):
        request.getfixturevalue(name).zero_grad()
