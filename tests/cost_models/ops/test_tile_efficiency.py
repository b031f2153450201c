"""How long products take: tiles and waves by hand, published measurements, and what fusion saves."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx, nn

from cost_models.cost_model import Roofline
from cost_models.formulas.symbols import Numbers
from cost_models.hardware.clusters import Cluster, Device
from cost_models.ops.cost import node_work
from cost_models.ops.fusion import Fusion, fused
from cost_models.ops.tile_efficiency import product_time
from cost_models.ops.work import Product, Work
from partitioner import partition
from passes.ir.program import StageCall

FLAT = Device("flat", {"float32": 1e12}, 2**30, 1e11, launch_overhead=0, compute_efficiency=1.0, bandwidth_efficiency=1.0)
TILED = Device(
    "tiled", {"float32": 1e12}, 2**30, 1e11, compute_efficiency=1.0, bandwidth_efficiency=1.0, processors=10, tiles=[(32, 32), (64, 16)]
)


def test_tiles_and_waves() -> None:
    def waves(product: Product, tile: tuple[int, int]) -> int:
        return math.ceil(product.batch * math.ceil(product.rows / tile[0]) * math.ceil(product.columns / tile[1]) / 10)

    for sizes in ((1, 320, 32, 100), (1, 321, 32, 100), (3, 64, 80, 50), (1, 33, 16, 10)):
        product = Product(*sizes)
        best = min(waves(product, tile) * 2 * tile[0] * tile[1] * product.inner / 1e11 for tile in ((32, 32), (64, 16)))
        assert product_time(product, TILED, torch.float32) == pytest.approx(best)
        assert product_time(product, FLAT, torch.float32) == product.flops / 1e12


def test_one_row_more_costs_a_wave() -> None:
    full, over = Product(1, 320, 32, 100), Product(1, 321, 32, 100)
    assert product_time(over, TILED, torch.float32) == pytest.approx(2 * product_time(full, TILED, torch.float32))


def test_a_long_sum_is_cut_between_processors() -> None:
    narrow = Product(1, 32, 32, 8192)
    alone = 2 * 32 * 32 * 8192 / 1e11
    assert alone / 9 < product_time(narrow, TILED, torch.float32) < alone / 5


@pytest.mark.parametrize(
    ("preset", "sizes", "published"),
    [("a100-80gb", (1024, 10240, 5120), 271.2e12), ("h100", (2048, 2048, 13312), 794.5e12), ("h200", (2048, 2048, 13312), 794.5e12)],
)
def test_the_best_published_products(preset: str, sizes: tuple[int, int, int], published: float) -> None:
    """Of short runs: what the A100's power limit sustains is 1305 of 1410 MHz."""
    product = Product(1, *sizes)
    rate = product.flops / product_time(product, Cluster.preset(preset).devices[0], torch.bfloat16)
    assert rate == pytest.approx(published * (1305 / 1410 if preset.startswith("a100") else 1), rel=0.02)


def test_a_host_that_runs_ahead_delays_short_operations_alone() -> None:
    device = Device(
        "ahead", {"float32": 1e12}, 2**30, 1e11, 1e-5, compute_efficiency=1, bandwidth_efficiency=1, asynchronous=True, kernel_latency=1e-6
    )
    time = Roofline().operation_time
    assert time(Work(0, 1e6, 1), device, torch.float32) == pytest.approx(1e-5 + 1e-6)
    assert time(Work(0, 1e3, 1), device, torch.float32) == pytest.approx(1e-5)


class Pointwise(nn.Module):
    """A chain of pointwise operations between products, with a value that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(torch.softmax(hidden * 2 + x, -1).relu() * hidden.exp())


def works_of(model: nn.Module, x: Tensor) -> dict[fx.Node, Work]:
    pm = partition(model.eval(), 1, "model", example_inputs=(x,))
    stage = next(module for module in pm.graph(0).children() if isinstance(module, StageCall))
    return {node: node_work(node) for node in stage.graph.graph.nodes}


@pytest.mark.parametrize(("fusion", "kernels", "moved"), [("none", 8, 14), ("hand", 4, 6), ("compiled", 3, 3)])
def test_fusion_keeps_what_lies_between_in_registers(fusion: Fusion, kernels: int, moved: int) -> None:
    """One kernel reads ``hidden`` and ``x`` and writes what the second layer reads; by hand, the softmax is written and read."""
    works, numbers = fused(works_of(Pointwise(), torch.rand(4, 16)), fusion), Numbers(4)
    assert sum(work.launches for work in works.values()) == kernels
    assert sum(numbers[work.bytes] for work in works.values() if work.family != "matrix product") == moved * 4 * 16 * 4


def test_fusion_does_not_jump_over_what_a_kernel_waits_for() -> None:
    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = x + 1
            return a * (a @ a)

    works = fused(works_of(Around(), torch.rand(4, 4)), "compiled")
    assert sum(work.launches for work in works.values()) == 3
