"""A simulated peak above the memory limit is named by the simulation, ``explain()``, the report and sweeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from partitioner import PartitionedModel, partition
from partitioner.experiments import sweep
from partitioner.planner.plan import PlanProblem
from partitioner.reports.explain.explanation import summary
from partitioner.reports.page.build import page_html

CLUSTER = Cluster.preset("h100", 1, 2)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


@pytest.fixture
def pm() -> PartitionedModel:
    return partition(net(), 2, "data", example_inputs=(torch.randn(8, 64),), cluster=CLUSTER, progress=False)


def low(simulation: Simulation) -> Simulation:
    """Return a simulation whose second device has 1 KiB less than it needs."""
    first, second = simulation.peak_memory
    return dataclasses.replace(simulation, limits=(float(first), second - 1024.0))


def test_a_simulation_has_the_limits_of_its_machine(pm: PartitionedModel) -> None:
    small = Cluster([dataclasses.replace(device, memory_bytes=40_000) for device in CLUSTER.devices], CLUSTER.links)
    found = pm.simulate()
    assert found.limits == tuple(0.92 * device.memory_bytes for device in CLUSTER.devices)
    assert not found.over_limit
    assert "over limit" not in str(found)
    found = pm.simulate(small)
    assert found.limits == (0.92 * 40_000,) * 2
    assert list(found.over_limit) == [0, 1]
    assert "over limit  the simulated peak of rank 0, " in str(found)
    assert "exceeds its limit of 35.9 KiB by " in str(found)
    assert ", and 1 other theirs" in str(found)
    assert "over limit" not in pm.explain()  # it is of the hardware of the plan


def test_equal_devices_share_a_row(pm: PartitionedModel) -> None:
    found = pm.simulate()
    first, second = found.memory
    rows = [line.split()[0] for line in str(dataclasses.replace(found, memory=(first,) * 64)).splitlines() if "KiB" in line]
    assert rows[0] == "0-63"
    longer = dataclasses.replace(second, activations=second.activations + 2**20)
    rows = [line.split("  ")[0] for line in str(dataclasses.replace(found, memory=(first, longer) * 32)).splitlines()]
    assert {"0, 2 ... 62", "1, 3 ... 63"} <= set(rows)


def test_a_limit_of_the_caller_holds_on_every_machine() -> None:
    pm = partition(net(), 2, "data", example_inputs=(torch.randn(8, 64),), cluster=CLUSTER, memory_limit="1GiB", progress=False)
    assert pm.simulate("a100-40gb:1x2").limits == (2.0**30,) * 2


def test_explain_and_the_report_name_what_a_simulation_found(pm: PartitionedModel) -> None:
    assert "simulated" not in pm.explain()
    found = low(pm.simulate())
    assert list(found.over_limit) == [1]
    assert "simulated" in pm.explain().split("memory")[0]
    words = found.over_limit_words
    assert "rank 1" in words
    assert words.endswith(" by 1.00 KiB")
    assert ("over limit", words) in summary(pm.explained(), found)
    page = page_html(pm.explained(), pm.device_table(), found, pm.cost_formula)
    assert words in page
    assert "peak of the fullest device, over its limit" in page


def test_a_row_of_a_sweep_says_by_how_much(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return net(), (torch.randn(8, 64),)

    fits = sweep({"net": made}, 2, ["data"], CLUSTER, store=str(tmp_path / "fits.db"))
    assert fits.table[0].over_limit is None
    peak = fits.table[0].peak_memory
    assert peak is not None
    monkeypatch.setattr(PlanProblem, "limits", property(lambda _: (peak - 2048.0,) * 2))
    over = sweep({"net": made}, 2, ["data"], CLUSTER, store=str(tmp_path / "over.db"))
    assert over.table[0].over_limit == 2048
    assert "over limit" in str(over)
