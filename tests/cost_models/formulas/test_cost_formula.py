"""``pm.cost_formula()``: the same numbers as the programs it was read from, at any batch, and over whole grids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sympy
import torch
from torch import nn

from cost_models.formulas.step import StepFormula
from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError


def perceptron(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width))


def parted(mode: str | dict[str, int], count: int, **keywords: object) -> PartitionedModel:
    inputs = (torch.rand(16, 32),)
    return partition(perceptron().train(), count, mode, example_inputs=inputs, cluster=f"v100:{count}", **keywords)  # type: ignore[arg-type]


def symbols(formula: StepFormula) -> dict[str, sympy.Symbol]:
    return {str(symbol): symbol for symbol in formula.symbols}


def test_one_device_by_hand() -> None:
    formula = parted("model", 1).cost_formula()
    names = symbols(formula)
    products = 2 * (32 * 64 + 64 * 64 + 64 * 32)
    backward = 2 * products - 2 * 32 * 64  # the first layer's input needs no gradient
    per_row = formula.step_time.subs({names["memory_bandwidth"]: sympy.oo, names["launch_overhead"]: 0})
    assert sympy.simplify(per_row * names["flop_rate"] / names["batch"]) == products + backward
    weights = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 32 + 32
    assert formula.memory.subs(names["batch"], 0) == 4 * weights * 4  # parameters, gradients and two states of AdamW
    assert not formula.bytes_moved


def test_a_pipeline_fills_and_drains() -> None:
    pm = parted({"pipeline": 2}, 2, n_microbatches=4, schedule="1F1B", stages_per_device=1)
    formula = pm.cost_formula()
    names = symbols(formula)
    fixed = {symbol: 1 for name, symbol in names.items() if name not in ("microbatches", "launch_overhead")}
    per_microbatch = formula.step_time.subs(fixed).diff(names["launch_overhead"])
    few, many = (per_microbatch.subs({names["launch_overhead"]: 1e9, names["microbatches"]: count}) for count in (1, 3))
    assert float(many / few) == pytest.approx((3 + 1) / (1 + 1))
    assert set(formula.bytes_moved) == {"pipeline"}
    width = 64 * 4
    sent = formula.bytes_moved["pipeline"].subs(names["batch"], 16)
    assert float(sent) == pytest.approx(16 * width, abs=8)  # one value or its gradient for each row, and the loss


def test_replicas_sum_gradients_in_rings() -> None:
    formula = parted({"data": 2}, 2).cost_formula()
    names = symbols(formula)
    weights = 4 * (32 * 64 + 64 + 64 * 64 + 64 + 64 * 32 + 32)
    communicated = formula.step_time.subs({names[name]: sympy.oo for name in ("flop_rate", "memory_bandwidth")})
    communicated = communicated.subs({names["launch_overhead"]: 0, names["latency_data"]: 0})
    for replicas in (2, 4, 64):
        expected = 2 * (replicas - 1) / replicas * weights
        told = (communicated * names["bandwidth_data"]).subs(names["replicas"], replicas)
        assert float(sympy.simplify(told)) == pytest.approx(expected, rel=1e-3)


def test_grids_are_the_formula_point_by_point() -> None:
    formula = parted({"data": 2, "tensor": 2}, 4).cost_formula()
    grids = {
        "batch": np.array([16.0, 64.0, 1024.0])[:, None, None, None],
        "microbatches": np.array([1.0, 2.0, 8.0])[:, None, None],
        "replicas": np.array([1.0, 2.0, 32.0])[:, None],
        "bandwidth_data": np.array([1e9, 1e10, 3e11]),
    }
    seconds, size = formula.evaluate(**grids)
    assert seconds.shape == size.shape == (3, 3, 3, 3)
    arrays = np.broadcast_arrays(*grids.values())
    names = symbols(formula)
    for place in ((0, 0, 0, 0), (2, 1, 0, 2), (1, 2, 2, 1), (2, 2, 2, 2)):
        point = dict(formula.defaults) | {name: float(array[place]) for name, array in zip(grids, arrays, strict=True)}
        values = {names[name]: value for name, value in point.items()}
        assert seconds[place] == pytest.approx(float(formula.step_time.subs(values)), rel=1e-12)
        assert size[place] == pytest.approx(float(formula.memory.subs(values)), rel=1e-12)


def test_an_unknown_symbol_is_named() -> None:
    formula = parted("model", 1).cost_formula()
    with pytest.raises(ConfigError, match=r"(?s)no symbol rows.*the symbols are batch"):
        formula.evaluate(rows=3)
    text = str(formula)
    assert "step time (s)" in text
    assert "rows of a step" in text


CONVOLUTIONS: list[tuple[str | dict[str, int], int]] = [
    ("model", 2), ("pipeline", 2), ("data", 2), ("fsdp", 2), ("zero1", 2), ("tensor", 2), ("tile", 2),
    ({"data": 2, "tensor": 2}, 4), ({"pipeline": 2, "tile": 2}, 4),
]  # fmt: skip
QUICK: list[tuple[str | dict[str, int], int]] = [("data", 2), ("tensor", 2), ("zero1", 2)]


@pytest.mark.parametrize(
    ("mode", "devices"), [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in CONVOLUTIONS]
)
def test_convolutions_have_a_formula_in_every_mode(mode: str | dict[str, int], devices: int, tmp_path: Path) -> None:
    """Rows, weights and gradients of a convolution come from inputs, gathers and losses, which tracing does not describe."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    images = torch.rand(4, 3, 16, 16)
    pm = partition(network, devices, mode, example_inputs=(images,), cluster=f"v100:{devices}", n_microbatches=1)
    formula = pm.cost_formula()
    # Per element of an image: forward products, weight gradients of both layers, input gradients of the second.
    first, second = 2 * 3 * 8 * 9, 2 * 8 * 8 * 9
    whole = 4 * 16 * 16 * (2 * first + 3 * second)
    flops = float(formula.evaluate(flop_rate=1e-3)[0]) * 1e-3  # of the slowest rank: so slow that nothing else counts
    if mode in ("data", "fsdp", "zero1", "tensor"):
        assert flops == pytest.approx(whole / devices, rel=1e-4)
    else:  # stages wait for the larger one as long as it works; two tiles compute the rows between them
        assert whole / devices <= flops * 1.0001 <= 2 * whole
    pm.save_report(tmp_path / "report.html")
    assert "no formula" not in (tmp_path / "report.html").read_text()
