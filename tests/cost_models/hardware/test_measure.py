"""Measured and fitted costs, and what is known of this machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware import detect as detection
from cost_models.hardware.clusters import Cluster
from cost_models.hardware.devices import Device, Link
from cost_models.hardware.measure import STEPS, gloo_link, measure_machine
from cost_models.ops.cost import call_work
from cost_models.ops.work import Gradients, Product, Work
from cost_models.profiling.cache import MeasurementStore, key_of
from cost_models.profiling.drift import Paces
from cost_models.profiling.kernels import kernels_of
from cost_models.profiling.op_times import MeasuredCosts, Sample, fitted, measure_call
from partitioner import partition
from passes.ir.tensor_spec import TensorSpec
from passes.rules.call import Call

aten = torch.ops.aten
DEVICE = Device("d", {"float32": 1e12}, 2**30, 1e11)


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(sizes, dtype)


def product(rows: int) -> Call:
    return Call.numbered(aten.mm.default, (("self", shape(rows, 64)), ("mat2", shape(64, 32))), (shape(rows, 32),))


LOOKUP = Call.numbered(
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
    refused = Call.numbered(aten.mm.default, (("self", shape(3, 4)), ("mat2", shape(5, 6))), (shape(3, 6),))
    assert measure_call(refused, torch.device("cpu")) is None


def test_each_call_is_timed_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def timing(call: Call, _device: torch.device) -> float:
        timed.append(key_of(call))
        return 0.5

    monkeypatch.setattr("cost_models.profiling.op_times.measure_call", timing)
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


def test_calls_are_timed_again_for_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is half as fast when calls are timed for the second time; one call more is asked for then."""
    rounds, timed = [{8: 1.0, 16: 10.0}, {8: 2.0, 16: 20.0, 32: 6.0}, {8: 1.1, 16: 10.0, 32: 3.0}], list[int]()

    def timing(call: Call, _device: torch.device) -> float:
        rows = int(call.result.shape[0])
        timed.append(rows)
        return rounds[timed.count(rows) - (rows != 32)][rows]

    monkeypatch.setattr("cost_models.profiling.op_times.measure_call", timing)
    costs = MeasuredCosts(tmp_path / "times.db")

    def found(*rows: int) -> list[float]:
        return [costs.operation_time(call_work(product(each)), DEVICE, torch.float32) for each in rows]

    assert found(8, 16) == [1.0, 10.0]
    costs.time_again()
    assert found(8, 16) == pytest.approx([1.5, 15.0])  # of two paces neither is usual
    assert found(32) == pytest.approx([6.0 / (2.0 / 1.5)])
    costs.time_again()
    assert found(8, 16, 32) == pytest.approx([1.0, 10.0, 3.0])  # the first also took 2 / 2 and 1.1
    assert [sample.seconds for sample in costs.samples] == found(8, 16, 32)
    assert len(timed) == 8
    again = MeasuredCosts(tmp_path / "times.db")
    assert [again.operation_time(call_work(product(each)), DEVICE, torch.float32) for each in (8, 16, 32)] == found(8, 16, 32)


def test_times_and_paces_are_found_together() -> None:
    """Of samples that are a call's time multiplied by the clock rate of the machine, which changes with every sixteenth."""
    draw, paces, number = random.Random(0), Paces(), itertools.count()
    times = {product(rows): draw.uniform(1, 100) for rows in range(1, 49)}

    def add(calls: Iterable[Call]) -> None:
        for call in calls:
            paces.add(call, times[call] * (1.0, 1.5, 1.2)[next(number) // 16 % 3])

    add(list(times)[:32])
    add(paces.shuffled_calls())
    add(list(times)[32:])
    for _ in range(3):
        add(paces.shuffled_calls())
    paces.settle()
    found = [paces.time(call) / seconds for call, seconds in times.items()]
    assert found == pytest.approx([found[0]] * len(times))
    assert 1.0 <= found[0] <= 1.5


def test_a_pace_lasts_no_longer_than_a_pause() -> None:
    """The machine is slow for one round: a call timed right after it has its clock rate, one a minute later does not."""
    now = [0.0]
    paces, calls = Paces(lambda: now[0]), [product(rows) for rows in range(1, 9)]
    for pace in (1.0, 1.0, 1.5):
        for call in calls:
            paces.add(call, 2.0 * pace)
    paces.settle()
    soon, later = product(100), product(101)
    paces.add(soon, 3.0)
    now[0] += 60
    paces.add(later, 6.0)
    for _ in range(2):
        assert [paces.time(call) for call in (calls[0], soon, later)] == pytest.approx([2.0, 2.0, 6.0])
        paces.settle()
    now[0] += 60
    for call in paces.shuffled_calls():
        paces.add(call, 3.0 if call == later else 2.0)
    paces.settle()
    assert [paces.time(call) for call in (calls[0], soon, later)] == pytest.approx([2.0, 2.0, 3.0], rel=1e-5)


@pytest.mark.parametrize("samples", [(0.0,), (1e-6, 0.0, 1e-6), (0.0, 1e-6), (0.0, 1e-6, 1e-6, 0.0, 1e-6), (0.0, 0.0, 1e-6)])
def test_times_too_short_for_the_clock_say_nothing_of_paces(samples: tuple[float, ...]) -> None:
    paces = Paces()
    for short in samples:
        for call, seconds in ((product(8), 5.0), (product(16), short), (product(32), 7.0)):
            paces.add(call, seconds)
    paces.settle()
    assert [paces.time(product(rows)) for rows in (8, 16, 32)] == pytest.approx([5.0, max(samples), 7.0])


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e-6])
def test_what_is_no_time_is_refused(seconds: float) -> None:
    """One of them would be in every clock rate."""
    paces = Paces()
    with pytest.raises(ValueError, match="is no number of seconds"):
        paces.add(product(8), seconds)
    assert list(paces.shuffled_calls()) == []


def test_halves_of_a_backward_are_scaled_and_the_rest_is_analytic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cost_models.profiling.op_times.measure_call", lambda *_: 2.0)
    costs, roofline, forward = MeasuredCosts(), Roofline(), call_work(product(8))
    half = Work(forward.flops * 2, forward.bytes, 2, "matrix product", call=forward.call, half="backward_input")
    ratio = roofline.operation_time(half, DEVICE, torch.float32) / roofline.operation_time(forward, DEVICE, torch.float32)
    assert costs.operation_time(half, DEVICE, torch.float32) == pytest.approx(2.0 * ratio)
    unnamed = Work(1e9, 1e6, 1)
    assert costs.operation_time(unnamed, DEVICE, torch.float32) == roofline.operation_time(unnamed, DEVICE, torch.float32)
    assert costs.transfer_time(1e6, Link(1e-3, 1e9)) == pytest.approx(2e-3)


def linear(rows: int) -> Call:
    values = ("input", shape(rows, 3, 64)), ("weight", shape(32, 64)), ("bias", shape(32))
    return Call.numbered(aten.linear.default, values, (shape(rows, 3, 32),))


ATTENTION = Call.numbered(
    aten.scaled_dot_product_attention.default,
    (*((name, shape(2, 2, 8, 4)) for name in ("query", "key", "value")), ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", True)),
    (shape(2, 2, 8, 4),),
)
WEIGHTS = ("weight", "weight"), ("bias", "weight")
KERNELS: dict[str, tuple[Call, Gradients, dict[str, list[str]]]] = {
    "a layer": (
        linear(2),
        (("input", "activation"), *WEIGHTS),
        {"forward": ["addmm"], "backward_input": ["mm"], "backward_weight": ["mm", "sum"]},
    ),
    "the first layer": (linear(2), WEIGHTS, {"forward": ["addmm"], "backward_input": [], "backward_weight": ["mm", "sum"]}),
    "a frozen layer": (linear(2), (("input", "activation"),), {"forward": ["addmm"], "backward_input": ["mm"], "backward_weight": []}),
    "attention": (
        ATTENTION,
        tuple((name, "activation") for name in ("query", "key", "value")),
        {
            "forward": ["_scaled_dot_product_flash_attention_for_cpu"],
            "backward_input": ["_scaled_dot_product_flash_attention_for_cpu_backward"],
            "backward_weight": [],
        },
    ),
    "a lookup": (LOOKUP, (("weight", "weight"),), {"forward": ["embedding"], "backward_weight": ["embedding_dense_backward"]}),
    "parts of a tensor": (
        Call.numbered(aten.split.Tensor, (("self", shape(4, 6)), ("split_size", 2)), (shape(2, 6), shape(2, 6))),
        (("self", "activation"),),
        {"forward": [], "backward_input": ["cat"]},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_call_that_trains_is_the_calls_that_it_becomes(name: str) -> None:
    call, gradients, expected = KERNELS[name]
    found = kernels_of(call, gradients, torch.device("cpu"))
    assert found is not None
    for half, operators in expected.items():
        assert [kernel.operator.overloadpacket.__name__ for kernel in found[half]] == operators  # type: ignore[index]


def test_what_is_timed_for_a_plan_is_what_its_programs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed anew for a simulation: plans and simulations are of the same times."""
    timed: list[str] = []

    def timing(call: Call, _device: torch.device) -> float:
        timed.append(key_of(call))
        return 1e-3 * len(timed)

    monkeypatch.setattr("cost_models.profiling.op_times.measure_call", timing)
    layers = (torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 16))
    arguments: dict[str, Any] = {"schedule": "ZB1P", "n_microbatches": 2, "cost_model": MeasuredCosts(), "progress": False}
    cluster = Cluster([DEVICE] * 2, Link(0.0, 1e15))
    pm = partition(torch.nn.Sequential(*layers), 2, "pipeline", example_inputs=(torch.rand(8, 16),), cluster=cluster, **arguments)
    planned = list(timed)
    assert pm.simulate().step_time == pytest.approx(pm.plan.step_time, rel=0.02)  # the loss, and what starts messages
    assert timed == planned


def test_a_call_that_cannot_be_differentiated_alone_is_priced_by_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cost_models.profiling.op_times.measure_call", lambda *_: 2.0)
    refused = Call.numbered(aten.mm.default, (("self", shape(3, 4)), ("mat2", shape(5, 6))), (shape(3, 6),))
    gradients = (("self", "activation"),)
    assert kernels_of(refused, gradients, torch.device("cpu")) is None
    work = replace(call_work(refused), gradients=gradients)
    assert MeasuredCosts().operation_time(work, DEVICE, torch.float32) == 2.0


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
    monkeypatch.setattr("cost_models.hardware.measure._SIZES", (32,))
    monkeypatch.setattr("cost_models.hardware.measure._COPIED_BYTES", 2**16)
    monkeypatch.setattr("cost_models.hardware.measure._MESSAGE_BYTES", (2**8, 2**12))
    monkeypatch.setattr("cost_models.hardware.measure._BYTES_BESIDE_WORK", 2**12)
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
