"""More layers of a model that stores parts of its parameters add their parts and the inputs of blocks, nothing whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partitioner import partition
from tests.support.models.attention.gpt import Gpt

WIDTH, ROWS, LENGTH = 512, 8, 64


def peaks(layers: int, ranks: int, precision: str) -> tuple[int, int, int]:
    """Return planned and simulated bytes of a rank, and bytes of all parameters."""
    with torch.device("meta"):
        model, tokens = Gpt(WIDTH, 4, layers), torch.zeros(ROWS, LENGTH, dtype=torch.long)
    options: dict[str, Any] = {"recompute": "full", "training": True, "optimizer": "adamw", "precision": precision, "progress": False}
    pm = partition(model, ranks, "fsdp", example_inputs=(tokens,), **options)
    return max(pm.plan.memory), max(pm.simulate().peak_memory), sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_eight_more_layers_add_parts_and_block_inputs(ranks: int, precision: str) -> None:
    """Of weights so large that each is gathered alone: smaller ones of several blocks share a message."""
    few, many = peaks(4, ranks, precision), peaks(12, ranks, precision)
    state = 4 * (many[2] - few[2]) / ranks  # parameters, gradients and two moments
    inputs = 8 * ROWS // ranks * LENGTH * WIDTH * 4
    for before, after in zip(few[:2], many[:2], strict=True):
        assert after - before <= 1.02 * (state + inputs)
