"""Runs that are recorded, beside their simulation."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError

WIDTH = 16


def partitioned(devices: int, mode: str | dict[str, int]) -> tuple[PartitionedModel, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    x = torch.randn(8, WIDTH)
    return partition(model, devices, mode, example_inputs=(x,), n_microbatches=4, schedule="1F1B", progress=False), x


@pytest.mark.parametrize(("devices", "mode"), [(2, "pipeline"), pytest.param(4, {"pipeline": 2, "tensor": 2}, marks=pytest.mark.slow)])
def test_slices_have_the_names_and_the_order_of_the_simulation(devices: int, mode: str | dict[str, int]) -> None:
    pm, x = partitioned(devices, mode)
    with pm.record() as run:
        recorded = pm.train_step(x, target=torch.zeros_like(x), loss_fn=nn.functional.mse_loss)
    measured, simulated = run.timeline, pm.simulate().timeline
    assert measured.ranks == simulated.ranks
    for rank in measured.ranks:
        names = [
            list(dict.fromkeys(each.section for each in timeline.computed if each.rank == rank and each.section[-1:].isdigit()))
            for timeline in (measured, simulated)
        ]
        assert [name for name in names[0] if "F" in name or "B" in name] == [name for name in names[1] if "F" in name or "B" in name]
        assert {each.name for each in measured.communicated if each.rank == rank} == {
            each.name for each in simulated.communicated if each.rank == rank
        }
    assert all(0 <= each.start <= each.end for each in (*measured.computed, *measured.communicated))
    assert pm.train_step(x, target=torch.zeros_like(x), loss_fn=nn.functional.mse_loss) == recorded  # not recorded any more


def test_both_lie_in_one_trace_and_in_one_picture() -> None:
    pm, x = partitioned(2, "pipeline")
    with pm.record() as run:
        pm.train_step(x, target=torch.zeros_like(x), loss_fn=nn.functional.mse_loss)
    simulated = pm.simulate().timeline
    names = {
        event["args"]["name"] for event in json.loads(simulated.to_json(run.timeline))["traceEvents"] if event["name"] == "process_name"
    }
    assert names == {"rank 0, simulated", "rank 1, simulated", "rank 0, measured", "rank 1, measured"}
    assert "rank 1 measured" in simulated.svg(run.timeline)


def test_a_recording_is_read_when_it_is_over() -> None:
    pm, _ = partitioned(2, "pipeline")
    with pm.record() as run, pytest.raises(ConfigError, match="not over"):
        _ = run.timeline
