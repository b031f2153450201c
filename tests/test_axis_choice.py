"""Which axes a tensor dimension cuts, by what the hardware is good at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partitioner import partition


@pytest.mark.parametrize("rows", [2, 4096])
def test_work_is_cut_whatever_the_batch(rows: int) -> None:
    """The sums grow with the batch, and so does the work: neither few rows nor many leave it whole on every rank."""
    width, devices = 1024, 4
    with torch.device("meta"):
        layers = (nn.Embedding(64, width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        inputs = (torch.zeros(rows, 16, dtype=torch.long),)
    pm = partition(nn.Sequential(*layers), devices, "tensor", example_inputs=inputs, cluster="h100:1x4", progress=False)
    assert not [note for note in pm.plan.notes if "multiply-adds whole" in note]
