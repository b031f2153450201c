"""A ``DeviceMesh`` as ``devices=``: its names are the mode, its order is that of the ranks. In one process, beside a fake process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from partitioner import Plan, partition
from partitioner.options.device_mesh import mode_on, processes_of
from partitioner.options.devices import resolve_devices
from partitioner.options.mode import resolve_mode
from passes.ir.errors import ConfigError
from tests.support.launch_cases import batch, difference, model

Mode = str | Mapping[str, Any]


@pytest.fixture(scope="module", autouse=True)
def fake_processes() -> Iterator[None]:
    """Enter a fake world of eight: a mesh is made without any other process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@pytest.mark.parametrize(
    ("shape", "names", "mode", "expected"),
    [
        ((2, 2), ("dp", "tp"), "auto", (("data", 2), ("tensor", 2))),
        ((2, 2, 2), ("pp", "dp_shard", "tp"), "auto", (("pipeline", 2), ("fsdp", 2), ("tensor", 2))),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "cp"), "auto", (("data", 2), ("fsdp", 2), ("sequence", 2))),
        ((1, 4, 1), ("pp", "fsdp", "tp"), "auto", (("fsdp", 4),)),
        ((4,), ("zero2",), "auto", (("zero2", 4),)),
        ((4,), ("tp",), "tensor", (("tensor", 4),)),
        ((4,), ("tp",), "tp", (("tensor", 4),)),
        ((2, 2), ("data", "tensor"), {"dp": 2, "tp": 2}, (("data", 2), ("tensor", 2))),
        ((2, 4), ("data", "tile"), {"data": 2, "tile": (2, 2)}, (("data", 2), ("tile0", 2), ("tile1", 2))),
        ((4,), None, "fsdp", (("fsdp", 4),)),
        ((2, 2), None, "fsdp", (("fsdp", 4),)),
        ((2, 2), None, {"pp": 2, "tp": 2}, (("pipeline", 2), ("tensor", 2))),
        ((4,), None, {"pp": 2, "tp": 2}, (("pipeline", 2), ("tensor", 2))),
        ((2, 2), None, {"tile": (2, 2)}, (("tile0", 2), ("tile1", 2))),
        ((3,), None, {"pipeline": 2, "tensor": (2, 1)}, (("pipeline", 2), ("tensor", 2))),
        ((4,), None, "auto", None),
    ],
)
def test_names_are_the_mode(shape: tuple[int, ...], names: tuple[str, ...] | None, mode: Mode, expected: Any) -> None:
    mesh = mesh_of(shape, names)
    found = resolve_mode(mode_on(mesh, mode), mesh.size())
    assert (None if found is None else found.dimensions) == expected


@pytest.mark.parametrize(
    ("shape", "names", "mode", "problem"),
    [
        (
            (2, 2),
            ("replicas", "tp"),
            "auto",
            r"\(replicas=2, tp=2\): there is no mode 'replicas'[^$]*remedy.*pipeline, tensor.*dp \(data\)",
        ),
        ((2, 1), ("tp", "expert"), "auto", "there is no mode 'expert'"),
        ((2, 2), ("dp", "data"), "auto", "names a mode twice: data, data"),
        ((4,), ("dp",), "fsdp", r"mode='fsdp' is not that of the device mesh \(dp=4\).*\{'data': 4\}"),
        ((2, 2), ("dp", "tp"), {"tp": 2, "dp": 2}, "is not that of the device mesh"),
        ((2, 4), ("dp", "tp"), {"dp": 4, "tp": 2}, "is not that of the device mesh"),
        ((2, 4), None, {"dp": 4, "tp": 2}, r"has not the shape of the device mesh of shape \(2, 4\)"),
    ],
)
def test_another_mode_is_refused(shape: tuple[int, ...], names: tuple[str, ...] | None, mode: Mode, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        partition(nn.Linear(8, 8), mesh_of(shape, names), mode, example_inputs=batch()[:1], progress=False)


def test_order_and_devices() -> None:
    permuted = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("dp", "tp"))
    assert processes_of(permuted) == (3, 1, 2, 0)
    assert processes_of(permuted["dp"]) == (1, 0)  # the column of this process, which is process 0
    assert resolve_devices(permuted, 4).processes == (3, 1, 2, 0)
    assert resolve_devices(4, 4).processes is None


def test_accelerators_have_the_numbers_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh("cuda", [3, 1])
    with pytest.raises(ConfigError, match="is one of cuda devices, and there are none"):
        resolve_devices(mesh, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert resolve_devices(mesh, None).devices == (torch.device("cuda", 3), torch.device("cuda", 1))
    assert resolve_devices(mesh, 2).devices == (torch.device("cuda"),) * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="there is no device cuda:3"):
        resolve_devices(mesh, None)


@pytest.mark.parametrize(
    ("mesh", "mode"),
    [pytest.param(((2, 2), ("dp", "tp")), "auto", marks=pytest.mark.slow), (((2,), None), "pipeline")],
    ids=["the mode of its names", "without names"],
)
def test_all_ranks_in_one_process(mesh: tuple[tuple[int, ...], tuple[str, ...] | None], mode: Mode) -> None:
    pm = partition(model(), mesh_of(*mesh), mode, example_inputs=batch()[:1], progress=False)
    assert difference(pm, model()) < 1e-12
    again = partition(model(), mesh_of(*mesh), plan=Plan.from_json(pm.plan.to_json()), example_inputs=batch()[:1], progress=False)
    assert again.plan == pm.plan


def test_a_plan_of_another_mesh_is_refused() -> None:
    plan = partition(model(), 4, {"data": 2, "tensor": 2}, example_inputs=batch()[:1], progress=False).plan
    for mesh in (mesh_of((2, 2), ("tp", "dp")), mesh_of((4,), ("dp",)), mesh_of((4, 1), None)):
        with pytest.raises(ConfigError, match=r"the plan is for the mesh \{'data': 2, 'tensor': 2\} and was given the device mesh"):
            partition(model(), mesh, plan=plan, example_inputs=batch()[:1], progress=False)
