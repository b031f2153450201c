"""Grids of affine transformations are products, equal to the kernel's; those of spatial transformers train in every mode."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from partitioner.tracing.trace import trace
from tests.support.models.case import Case, mean_squared_error, real
from tests.support.running.slow_values import slow
from tests.support.running.traced import assert_equal_runs, run_model, run_traced
from tests.support.running.transparency import first_difference


class Grids(nn.Module):
    """Grids of images or volumes of the given size."""

    def __init__(self, size: tuple[int, ...], align_corners: bool) -> None:
        super().__init__()
        self.size, self.align_corners = size, align_corners

    def forward(self, matrices: Tensor) -> Tensor:
        return F.affine_grid(matrices, [matrices.shape[0], 2, *self.size], align_corners=self.align_corners)


class Transformer(nn.Module):
    """A spatial transformer (Jaderberg et al., 2015): images are sampled where an affine map of their own says."""

    def __init__(self) -> None:
        super().__init__()
        self.locate, self.conv = nn.Linear(36, 6), nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        matrices = self.locate(x.flatten(1)).view(-1, 2, 3)
        return self.conv(F.grid_sample(x, F.affine_grid(matrices, list(x.size()), align_corners=False), align_corners=False))


def images(generator: Generator, rows: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (real(generator, rows, 1, 6, 6),), {}


TRANSFORMER = Case("transformer", Transformer, images, lambda generator, rows: real(generator, rows, 3, 6, 6), mean_squared_error)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(4, 5), (3, 4, 2)])
def test_grids_are_those_of_the_kernel(size: tuple[int, ...], align_corners: bool) -> None:
    model = Grids(size, align_corners)
    matrices = torch.randn(3, len(size), len(size) + 1, dtype=torch.float64)
    graph = trace(model, (matrices,))
    assert graph.batch is not None
    assert not graph.mixed
    assert_equal_runs(run_traced(graph, model, (matrices,), {}), run_model(model, (matrices,), {}))


@pytest.mark.parametrize("mode", ["data", *slow("pipeline", "tensor", "fsdp", {"data": 2, "pipeline": 2})])
def test_a_spatial_transformer_trains(mode: str | Mapping[str, int]) -> None:
    assert first_difference(TRANSFORMER, mode=mode, devices=4 if isinstance(mode, Mapping) else 2) is None
