"""Options of the placements of a sweep: those of ``partition``, each a value or several."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import Cluster, Constraints, Device, Link, partition
from partitioner.experiments import Results, sweep
from partitioner.experiments.results.placement import placements
from partitioner.experiments.run.evaluate import READ_BY_REQUEST, SAME_IN_REQUEST
from partitioner.experiments.run.sweep_options import GRID, NOT_IN_SWEEPS, OF_TRACE, option_grid, option_names, read_options
from partitioner.options.mode import parse_mode
from passes.ir.errors import ConfigError
from tests.support.planning.sweep_models import perceptron


def small(**more: Any) -> Results:
    """Return a sweep of one model in this process."""
    return sweep(**{"models": {"net": perceptron}, "devices": 2, "modes": "data", "clusters": "h100:1x2", "workers": 0, **more})


# -- against the signature of partition ------------------------------------------------------------------------------------------------


def test_every_keyword_of_partition_is_an_option_or_has_a_reason() -> None:
    parameters = set(inspect.signature(partition).parameters)
    read = {*OF_TRACE, *READ_BY_REQUEST, *SAME_IN_REQUEST}
    assert read | set(GRID) | set(NOT_IN_SWEEPS) == parameters
    assert set(option_names()) - {"axes", "tp_plan", "split_spec", "pin", "device_map", "halo", "attention"} == read
    assert {name for name in GRID.values() if name != "progress"} <= set(inspect.signature(sweep).parameters)


# -- which combinations ----------------------------------------------------------------------------------------------------------------


def test_every_combination_is_an_option() -> None:
    found = option_grid({"precision": ["bf16-mixed", None], "optimizer": ["sgd", "adamw"], "memory_limit": "1GiB"})
    assert [json.loads(each) for each in found] == [
        {"memory_limit": "1GiB", "optimizer": "sgd", "precision": "bf16-mixed"},
        {"memory_limit": "1GiB", "precision": "bf16-mixed"},
        {"memory_limit": "1GiB", "optimizer": "sgd"},
        {"memory_limit": "1GiB"},
    ]
    assert option_grid({"optimizer": "adamw", "batchnorm": "sync"}) == option_grid({}) == [""]


def test_values_are_read_as_they_were_written() -> None:
    constraints = Constraints(axes={"heads": "tensor"}, pin={"0": 1}, device_map={"1": torch.device("cuda:1")})
    (text,) = option_grid({"constraints": constraints, "reduce_dtype": torch.bfloat16, "batch_dims": {"x": 1, "mask": "none"}})
    assert read_options(text) == {
        "constraints": Constraints(axes={"heads": "tensor"}, pin={"0": 1}, device_map={"1": "cuda:1"}),
        "reduce_dtype": "bfloat16",
        "batch_dims": {"x": 1, "mask": None},
    }


def test_fields_of_constraints_stand_by_themselves() -> None:
    assert option_grid({"axes": {"heads": "tensor"}}) == option_grid({"constraints": {"axes": {"heads": "tensor"}}})
    assert len(option_grid({"attention": ["ring", "gather"], "axes": [{"heads": "tensor"}, None]})) == 4
    with pytest.raises(ConfigError, match="both given"):
        option_grid({"axes": {"heads": "tensor"}, "constraints": Constraints()})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"precison": "bf16-mixed"}, "sweep() has no 'precison'\n  remedy: did you mean precision?"),
        ({"microbatchs": 2}, "did you mean microbatches?"),
        ({"precision": "bf16"}, "there is no precision='bf16'"),
        ({"optimizer": []}, "`optimizer` is empty"),
        ({"training": "yes"}, "training must be a bool"),
        ({"constraints": {"axis": {}}}, "constraints have no 'axis'"),
        ({"axes": {"heads": 3}}, "Constraints: axes"),
        ({"plan": "plan.json"}, "a sweep takes no plan"),
        ({"mode": "data"}, "modes= and mode= are both given"),
        ({"recompute": {"0": "ful"}}, "did you mean 'full'"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**options)
    assert problem in str(caught.value)
    assert "remedy: " in str(caught.value)


def test_options_of_stages_are_dropped_without_stages() -> None:
    found = placements(("a",), (2,), ("data", "pipeline"), ("x",), options=option_grid({"stages_per_device": [1, 2]}))
    assert [(each.mode, each.options) for each in found] == [
        ("data", ""),
        ("pipeline", '{"stages_per_device": 1}'),
        ("pipeline", '{"stages_per_device": 2}'),
    ]


# -- rows ------------------------------------------------------------------------------------------------------------------------------

SAME = [
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true", "optimizer": "sgd"},
    {"training": False},
    {"recompute": {"0": "full"}},
    {"mode": "pipeline", "stages_per_device": 2, "schedule": "Interleaved1F1B", "n_microbatches": 4},
    {"mode": "pipeline", "constraints": Constraints(split_spec={"2": "beginning"})},
    {"mode": "fsdp", "reduce_dtype": "bfloat16", "precision": "bf16-mixed"},
]


@pytest.mark.parametrize("options", SAME, ids=str)
def test_a_row_is_what_partition_and_simulate_give(options: dict[str, Any]) -> None:
    mode = options.get("mode", "data")
    results = small(**{"modes": mode, **{name: value for name, value in options.items() if name != "mode"}})
    (row,) = results.rows()
    assert row["status"] == "ok", row["reason"]
    model, inputs = perceptron()
    pm = partition(model, ["cpu"] * 2, **{"mode": mode, **options}, example_inputs=inputs, cluster="h100:1x2")
    assert row["plan_hash"] == pm.plan.hash
    simulation = pm.simulate()
    assert row["step_time"] == pytest.approx(simulation.step_time, rel=1e-9)
    assert row["peak_memory"] == max(simulation.peak_memory)


def two_blocks() -> tuple[nn.Module, tuple[torch.Tensor]]:
    layers = [layer for _ in range(2) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    return nn.Sequential(*layers), (torch.zeros(16, 64),)


@pytest.mark.parametrize("mesh", [{"pipeline": 2, "tensor": 2}, pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow)], ids=str)
def test_programs_of_many_ranks_have_the_time_of_each_rank(mesh: dict[str, int]) -> None:
    """Only the first rank adds the bias of a layer whose rows are sharded, the others fill zeros; layouts are those of the whole batch."""
    count = 4 if "pipeline" in mesh else None
    results = small(models={"net": two_blocks}, devices=4, modes=mesh, microbatches=count, clusters="h100:1x4")
    (row,) = results.rows()
    model, inputs = two_blocks()
    pm = partition(model, ["cpu"] * 4, mesh, example_inputs=inputs, n_microbatches=count, cluster="h100:1x4")
    simulation = pm.simulate()
    assert row["step_time"] == pytest.approx(simulation.step_time, rel=1e-9)
    assert row["peak_memory"] == max(simulation.peak_memory)


def convolutions() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)), (torch.zeros(2, 1, 16, 16),)


@pytest.mark.slow
def test_tiles_are_of_devices_or_of_one_in_turn() -> None:
    results = small(models={"net": convolutions}, devices=[1, 4], modes=[{"tile": 4}, {"data": 1, "tile": (4, 1)}], clusters="h100:1x4")
    assert not results.failures
    assert [(row["devices"], row["mode"], row["mesh"], row["schedule"]) for row in results.rows()] == [
        (1, "tile=4", "tile=2x2", "none"),
        (4, "tile", "tile=2x2", "none"),
        (1, "tile=4x1", "tile=4x1", "none"),
        (4, "tile=4x1", "tile=4", "none"),
    ]
    model, inputs = convolutions()
    for row in results.rows():
        pm = partition(model, ["cpu"] * row["devices"], parse_mode(row["mode"]), example_inputs=inputs, cluster="h100:1x4")
        assert row["plan_hash"] == pm.plan.hash
        simulation = pm.simulate()
        assert (row["step_time"], row["peak_memory"]) == (pytest.approx(simulation.step_time, rel=1e-9), max(simulation.peak_memory))
    with pytest.raises(ConfigError, match="has none of the numbers of devices 2"):
        small(models={"net": convolutions}, modes={"tile": 4})


def test_policies_by_pattern_are_kept_apart() -> None:
    results = small(recompute=[{"0": "full"}, {"2": "full"}, {"0": "full", "2": "full"}, None], modes="data")
    assert [row["recompute"] for row in results.rows()][:3] == ["0=full", "2=full", "0=full,2=full"]
    assert not results.failures
    assert len({row["plan_hash"] for row in results.rows()}) == 4


def test_a_row_tells_the_plan() -> None:
    results = small(devices=4, modes=["auto", {"data": 2, "tensor": 2}], clusters="h100:1x4")
    auto, given = results.rows()
    assert auto["mode"] == "auto"
    assert auto["mesh"] not in ("", "auto")
    assert auto["runner_up"]
    assert given["mesh"] == "data=2,tensor=2"
    for row in (auto, given):
        assert row["schedule"]
        assert row["bound_by"]
        assert row["rows_per_second"] == pytest.approx(row["batch_size"] / row["step_time"])
        assert row["tokens_per_second"] is None
    assert results.best(by="rows_per_second") == results.best(by="step_time")
    heading = str(results).splitlines()[0]
    assert "mesh" in heading
    assert "rows/s" in heading
    assert "MFU" in heading


def tokens() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 48, bias=False)), (torch.zeros(8, 16, dtype=torch.long),)


def test_tokens_and_utilization_by_hand() -> None:
    (row,) = small(models={"net": tokens}, devices=1, clusters="h100:1x1").rows()
    assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_time"])
    flops = 2 * 8 * 16 * 32 * 48  # of each of the three products: forward, both gradients
    assert row["mfu"] == pytest.approx(3 * flops / 67e12 / row["step_time"])
    assert "tokens/s" in str(small(models={"net": tokens}, devices=1, clusters="h100:1x1"))


def test_mixed_precision_is_measured_by_its_peak() -> None:
    (row,) = small(models={"net": tokens}, devices=1, clusters="h100:1x1", precision="bf16-mixed").rows()
    assert row["mfu"] == pytest.approx(3 * 2 * 8 * 16 * 32 * 48 / 989.4e12 / row["step_time"])
    assert json.loads(row["options"]) == {"precision": "bf16-mixed"}


def test_a_plan_of_one_stage_has_no_schedule() -> None:
    results = small(modes=["fsdp", "tensor", "pipeline"])
    assert not results.failures
    assert {row["mode"] for row in results.rows() if row["schedule"] == "none"} == {"fsdp", "tensor"}
    assert "none" in str(results)


def test_options_are_shown_without_json() -> None:
    shown = str(small(precision="bf16-mixed", optimizer="sgd", axes={"batch": "data"}))
    assert 'constraints={"axes": {"batch": "data"}}, optimizer=sgd, precision=bf16-mixed' in shown


def test_the_price_of_a_step_is_that_of_its_devices() -> None:
    cheap, free = (Device("a", {"float32": 1e12}, memory_bytes=10**9, memory_bandwidth=1e10, price_per_hour=price) for price in (2.5, 0.0))
    clusters = {"cheap": Cluster([cheap] * 3, links=Link(1e-6, 1e9)), "free": Cluster([free] * 2, links=Link(1e-6, 1e9))}
    results = small(modes="data", clusters=clusters)
    costs = {row["cluster"]: (row["step_cost"], row["step_time"]) for row in results.rows()}
    assert costs["cheap"][0] == pytest.approx(2 * 2.5 * costs["cheap"][1] / 3600)
    assert costs["free"][0] == 0.0
    assert [row["cluster"] for row in results.pareto().rows()] == ["free"]
    assert "step cost" in str(results)
    assert small().rows()[0]["step_cost"] is None
