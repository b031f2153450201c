"""Devices of ranks: meaning of ``devices=`` by the number of accelerators, in one process and in several."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import partition
from partitioner.options.devices import DevicesArgument, resolve_devices
from partitioner.runtime import torchrun
from partitioner.runtime.process.session import members_of
from partitioner.runtime.state.stored_parameters import owners
from passes.ir.errors import ConfigError
from passes.spmd.shards import Block


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Set torchrun's variables for so many processes, in all and on this machine."""
    everywhere, here = request.param
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(everywhere))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    return int(everywhere)


def names(devices: DevicesArgument, world_size: int | None = None) -> list[str]:
    local_world_size = None if world_size is None else torchrun.local_world_size()
    return [str(device) for device in resolve_devices(devices, world_size, local_world_size).devices]


@pytest.mark.parametrize(
    ("accelerators", "devices", "expected"),
    [
        (0, 2, ["cpu", "cpu"]),
        (1, 2, ["cpu", "cpu"]),
        (2, 2, ["cuda:0", "cuda:1"]),
        (8, 2, ["cuda:0", "cuda:1"]),
        (3, None, ["cuda:0", "cuda:1", "cuda:2"]),
        (2, ["cuda:1", "cpu", "cuda"], ["cuda:1", "cpu", "cuda:0"]),
        (0, [torch.device("meta"), "cpu"], ["meta", "cpu"]),
    ],
    indirect=["accelerators"],
)
@pytest.mark.usefixtures("accelerators")
def test_ranks_in_one_process(devices: DevicesArgument, expected: list[str]) -> None:
    assert names(devices) == expected


@pytest.mark.parametrize(
    ("accelerators", "processes", "devices", "expected"),
    [
        (0, (2, 2), 2, "cpu"),
        (1, (2, 2), 2, "cpu"),  # two processes on one accelerator: NCCL refuses that
        (2, (2, 2), 2, "cuda"),
        (8, (2, 2), 2, "cuda"),
        (4, (8, 4), 8, "cuda"),  # two machines
        (8, (8, 4), 8, "cuda"),
        (2, (8, 4), 8, "cpu"),
        (4, (8, 4), None, "cuda"),
        (0, (8, 4), None, "cpu"),
        (1, (4, 4), ["cuda:0"] * 4, "cuda:0"),  # each process sees its own
        (4, (4, 4), ["cuda"] * 4, "cuda"),
        (4, (4, 4), ["cpu"] * 4, "cpu"),
    ],
    indirect=["accelerators", "processes"],
)
@pytest.mark.usefixtures("accelerators")
def test_a_rank_a_process(processes: int, devices: DevicesArgument, expected: str) -> None:
    assert names(devices, processes) == [expected] * processes


@pytest.mark.parametrize(("accelerators", "processes"), [(2, (4, 2))], indirect=True)
@pytest.mark.usefixtures("accelerators")
def test_devices_that_are_not_there(processes: int) -> None:
    for world_size in (None, processes):
        with pytest.raises(ConfigError, match="there is no device cuda:2"):
            names(["cuda:0", "cuda:1", "cuda:2", "cuda:3"], world_size)
    with pytest.raises(ConfigError, match="3 devices were asked for and there are 4 processes"):
        names(3, processes)


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (3, 3), (4, 0), (7, 3)])
def test_the_device_of_a_process_is_the_one_that_torchrun_means(rank: int, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two machines with eight accelerators each, of which four are used: rank 4 is the first on its machine."""
    started = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    devices = resolve_devices(8, torchrun.world_size(), torchrun.local_world_size()).devices
    assert torchrun._with_local_index(devices[rank], members_of()) == torch.device("cuda", local_rank)
    assert torchrun._with_local_index(torch.device("cuda", 5), members_of()) == torch.device("cuda", 5)
    assert torchrun._with_local_index(torch.device("cpu"), members_of()) == torch.device("cpu")


def test_without_local_rank_the_device_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="LOCAL_RANK is not set"):
        torchrun._with_local_index(torch.device("cuda"), members_of())
    assert torchrun._with_local_index(torch.device("cuda", 1), members_of()) == torch.device("cuda", 1)


def test_processes_are_all_here_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert torchrun.local_world_size() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert torchrun.local_world_size() == 2


@pytest.mark.parametrize("accelerators", [0], indirect=True)
@pytest.mark.usefixtures("accelerators")
def test_all_accelerators_when_there_are_none() -> None:
    with pytest.raises(ConfigError, match="there are none") as raised:
        partition(nn.Linear(2, 2))
    assert "pass devices=4" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cluster": "h100:2x8"}, 16),
        ({"cluster": "h100:2x8", "devices": 4, "mode": "data"}, 4),
        ({"mode": {"data": 2, "pipeline": (2, 1)}}, 6),
        ({"cluster": "h100:1x4", "mode": "data"}, 4),
        ({"cluster": "h100:1x4", "mode": {"data": 2}}, "the mesh {'data': 2} has 2 devices and 4 were given"),
        ({"mode": {"data": 2, "pipeline": -1}}, "'pipeline' has size -1"),
    ],
)
def test_a_cluster_or_a_mesh_implies_the_devices(options: dict[str, Any], expected: int | str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if isinstance(expected, int):
        assert partition(model, example_inputs=(torch.randn(16, 8),), **options).plan.n_ranks == expected
    else:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            partition(model, example_inputs=(torch.randn(16, 8),), **options)


def test_a_plan_implies_the_devices() -> None:
    model, inputs = nn.Linear(8, 8), (torch.randn(4, 8),)
    plan = partition(model, 2, "data", example_inputs=inputs).plan
    assert partition(model, example_inputs=inputs, plan=plan).plan == plan
    assert partition(model, example_inputs=inputs, plan=plan, cluster="h100:1x4").plan == plan


def test_owners_of_blocks_are_found_twice_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tensors and norms of gradients. Once for each rank besides, thousands of devices took time in the square of their number."""
    asked: list[int] = []

    def counted(holders: Iterable[tuple[int, Block]]) -> dict[Block, int]:
        asked.append(1)
        return owners(holders)

    for module in ("materialize", "parameters"):
        monkeypatch.setattr(f"partitioner.runtime.state.{module}.owners", counted)
    pm = partition(nn.Linear(8, 8), 300, "data", example_inputs=(torch.randn(300, 8),))
    assert all(len(bound.tensors) == 2 for bound in pm.traced.state.bound.values())  # of all ranks
    assert len(asked) == 4
