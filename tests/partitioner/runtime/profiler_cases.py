"""A profiled step, and what worker processes do for the tests of profiler traces."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from partitioner import PartitionedModel, partition

WIDTH = 4


def partitioned(mode: str) -> tuple[PartitionedModel, Tensor]:
    """Four layers on two ranks; a pipeline has two microbatches, and draws random numbers on both stages."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)]
    x = torch.randn(4, WIDTH)
    pipeline = {"n_microbatches": 2, "schedule": "1F1B"} if mode == "pipeline" else {}
    return partition(nn.Sequential(*layers), 2, mode, example_inputs=(x,), progress=False, **pipeline), x  # type: ignore[arg-type]


def step(pm: PartitionedModel, x: Tensor) -> Tensor:
    return pm.train_step(x, target=torch.zeros_like(x), loss_fn=nn.functional.mse_loss)


def profiled_names(mode: str) -> set[str]:
    """Return the names of all ranges of a training step on this rank."""
    pm, x = partitioned(mode)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step(pm, x)
    return {event.name for event in trace.events() or ()}
