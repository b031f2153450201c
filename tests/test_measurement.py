"""Measured and fitted costs, and what is known of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cost_models.calls import Call
from cost_models.cost_model import CostModel, Roofline
from cost_models.devices import Device, Link
from cost_models.measured.costs import MeasuredCosts, Sample, fitted
from cost_models.measured.operations import measure_call
from cost_models.measured.store import MeasurementStore, key_of
from cost_models.measurement import detect as detection
from cost_models.measurement.machine import STEPS, gloo_link, measure_machine
from cost_models.node_work import call_work
from cost_models.sizes import TensorShape
from cost_models.work import Product, Work
from partitioner import partition

aten = torch.ops.aten
DEVICE = Device("d", {"float32": 1e12}, 2**30, 1e11)


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorShape:
    return TensorShape(sizes, dtype)


def product(rows: int) -> Call:
    return Call(aten.mm.default, (("self", shape(rows, 64)), ("mat2", shape(64, 32))), (shape(rows, 32),))


LOOKUP = Call(
    aten.embedding.default,
    (
        ("weight", shape(9, 4)),
        ("indices", shape(3, 5, dtype=torch.int64)),
        ("padding_idx", -1),
        ("scale_grad_by_freq", False),
        ("sparse", False),
    ),
    (shape(3, 5, 4),),
)


def test_calls_run_on_made_up_tensors() -> None:
    for call in (product(8), LOOKUP):
        seconds = measure_call(call, torch.device("cpu"))
        assert seconds is not None
        assert 0 < seconds < 10
    refused = Call(aten.mm.default, (("self", shape(3, 4)), ("mat2", shape(5, 6))), (shape(3, 6),))
    assert measure_call(refused, torch.device("cpu")) is None


def test_each_call_is_timed_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def timing(call: Call, _device: torch.device) -> float:
        timed.append(key_of(call))
        return 0.5

    monkeypatch.setattr("cost_models.measured.costs.measure_call", timing)
    file = tmp_path / "times.db"
    for _ in range(2):
        costs: CostModel = MeasuredCosts(file)
        for rows in (8, 8, 16):
            assert costs.operation_time(call_work(product(rows)), DEVICE, torch.float32) == 0.5
    assert timed == [
        "aten.mm.default(self=float32[8, 64], mat2=float32[64, 32])",
        "aten.mm.default(self=float32[16, 64], mat2=float32[64, 32])",
    ]
    assert product(8) not in MeasurementStore(file, "another machine")


def test_halves_of_a_backward_are_scaled_and_the_rest_is_analytic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cost_models.measured.costs.measure_call", lambda *_: 2.0)
    costs, roofline, forward = MeasuredCosts(), Roofline(), call_work(product(8))
    half = Work(forward.flops * 2, forward.bytes, 2, "matrix product", call=forward.call, half="backward_input")
    ratio = roofline.operation_time(half, DEVICE, torch.float32) / roofline.operation_time(forward, DEVICE, torch.float32)
    assert costs.operation_time(half, DEVICE, torch.float32) == pytest.approx(2.0 * ratio)
    unnamed = Work(1e9, 1e6, 1)
    assert costs.operation_time(unnamed, DEVICE, torch.float32) == roofline.operation_time(unnamed, DEVICE, torch.float32)
    assert costs.transfer_time(1e6, Link(1e-3, 1e9)) == pytest.approx(2e-3)


def test_fitted_rates_are_those_that_made_the_times() -> None:
    works = [Work(2 * m * n * 64, 4 * (m + n) * 64, 1, "matrix product", (Product(1, m, n, 64),)) for m in (8, 64, 512) for n in (16, 256)]
    times = [work.flops * 3e-12 + work.bytes * 5e-11 + 7e-6 for work in works]
    model = fitted(Sample(work, torch.float32, seconds) for work, seconds in zip(works, times, strict=True))
    for work, seconds in zip(works, times, strict=True):
        assert model.operation_time(work, DEVICE, torch.float32) == pytest.approx(seconds, rel=1e-6)
    rates = model.rates["matrix product", torch.float32]
    assert (rates.per_flop, rates.per_byte, rates.per_launch) == pytest.approx((3e-12, 5e-11, 7e-6), rel=1e-6)
    other = Work(0, 1e6, 1, "pointwise")
    assert model.operation_time(other, DEVICE, torch.float32) == Roofline().operation_time(other, DEVICE, torch.float32)


def test_no_rate_is_fitted_below_zero() -> None:
    works = [Work(flops, 1e3, 1, "matrix product") for flops in (1e6, 1e7, 1e8)]
    model = fitted(Sample(work, torch.float32, seconds) for work, seconds in zip(works, (3e-5, 2e-5, 1e-5), strict=True))
    rates = model.rates["matrix product", torch.float32]
    assert min(rates.per_flop, rates.per_byte, rates.per_launch) >= 0


def test_measured_costs_price_a_partitioned_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    costs = MeasuredCosts()
    pm = partition(model.train(), 2, {"pipeline": 2}, example_inputs=(torch.rand(4, 16),), cost_model=costs)
    assert pm.simulate().step_time > 0
    assert {sample.work.family for sample in costs.samples} >= {"matrix product", "pointwise"}


def test_a_link_is_the_line_through_its_times() -> None:
    found = gloo_link({size: 2e-4 + size / 1e9 for size in (2**10, 2**16, 2**22)}, 0.75)
    assert (found.latency, found.bandwidth, found.host_share) == pytest.approx((2e-4, 1e9, 0.75))
    assert gloo_link({2**10: 1e-6, 2**20: 2e-3, 2**21: 3e-3}, 0.0).latency >= 0


def test_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("cost_models.measurement.machine._SIZES", (32,))
    monkeypatch.setattr("cost_models.measurement.machine._COPIED_BYTES", 2**16)
    monkeypatch.setattr("cost_models.measurement.machine._MESSAGE_BYTES", (2**8, 2**12))
    device, link = measure_machine(torch.device("cpu"), told.append)
    assert len(told) == STEPS
    assert set(device.peak_flops) == {"float32", "float64", "bfloat16", "float16"}
    assert min(*device.peak_flops.values(), device.memory_bandwidth, link.bandwidth) > 0
    assert link.latency >= 0
    assert 0 <= link.host_share <= 1
    assert device.memory_bytes > 2**28
    first = detection.detect(refresh=False, progress=False, folder=tmp_path)
    monkeypatch.setattr(detection, "measure_machine", None)
    assert detection.detect(refresh=False, progress=False, folder=tmp_path) == first
    next(tmp_path.iterdir()).write_text("not what was written")
    with pytest.raises(TypeError):
        detection.detect(refresh=False, progress=False, folder=tmp_path)
