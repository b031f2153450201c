"""The remedies of InfeasiblePlanError are true: the devices, and the memory, that they name are planned and fit."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch

from partitioner import InfeasiblePlanError, PartitionedModel, partition
from tests.partitioner.planner.search.test_recomputed_regions import example
from tests.support.running.slow_values import slow

MODES: list[Any] = [
    (2, "fsdp"),
    *slow((1, "model"), (2, "pipeline"), (2, "data"), (2, "tensor"), (4, {"pipeline": 2, "fsdp": 2}), (4, {"data": 2, "tensor": 2})),
]


def planned(devices: int, mode: Any, limit: int | str) -> PartitionedModel:
    model, _ = example()
    x = torch.zeros(64, 64)
    return partition(model, devices, mode, example_inputs=(x,), training=True, memory_limit=limit, progress=False)


@pytest.mark.parametrize("setting", MODES, ids=str)
@pytest.mark.parametrize("fraction", [0.25, *slow(0.5)])
@pytest.mark.filterwarnings("ignore:train_step\\(\\) fits:partitioner.PartitionWarning")
def test_remedies_are_planned_and_fit(setting: tuple[int, Any], fraction: float) -> None:
    devices, mode = setting
    limit = int(fraction * max(planned(devices, mode, "1GiB").plan.memory))
    try:
        planned(devices, mode, limit)
    except InfeasiblePlanError as error:
        remedy = error.remedy or ""
    else:
        assert fraction == 0.5  # half of the memory that is free may be enough
        return
    more = re.search(r"(\d+) such devices fit it(?: with mode=(\{.*?\}))?", remedy)
    assert more is not None
    larger_mode = mode if more[2] is None else ast.literal_eval(more[2])
    assert max(planned(int(more[1]), larger_mode, limit).plan.memory) <= limit
    larger = re.search(r"devices? of ([\d.]+ [KMG]iB)", remedy)
    assert larger is not None
    planned(devices, mode, larger[1].replace(" ", ""))
