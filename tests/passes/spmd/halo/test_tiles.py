"""Tiles give the numbers of the whole: every windowed operation, in one, two and three dimensions, over grids of every kind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.running.tiles import first_difference_of_tiles
from tests.support.samples.tile_operations import OPERATIONS, drawn

DRAWS = 5
"""Random calls of each operation."""

QUICK = ("convolution",)
"""Operations whose first draw always runs."""


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # of even kernels, which is what they are for
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if name in QUICK and seed == 0 else (pytest.mark.slow,))
        for name in OPERATIONS
        for seed in range(DRAWS)
    ],
)
def test_operations(name: str, seed: int) -> None:
    """The result, the gradient of the input and those of the parameters, in float64."""
    model, x, grid = drawn(name, seed)
    devices = grid if isinstance(grid, int) else math.prod(grid)
    assert first_difference_of_tiles(model, x, devices, {"tile": grid}) == ""


@pytest.mark.slow
def test_groups_of_one_channel() -> None:
    """A size of one is no factor; statistics run over space alone."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(4, 4)).double()
    assert first_difference_of_tiles(model, torch.rand(2, 3, 8, 8, dtype=torch.float64), 2, {"tile": (2, 1)}) == ""
