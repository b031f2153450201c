"""Read ``devices=``: the number of ranks, and the device of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from cost_models.hardware.clusters import Cluster
from cost_models.hardware.devices import check_count, parse_device
from partitioner.options.arguments import read_cluster
from partitioner.options.device_mesh import processes_of
from partitioner.options.mode import ranks_of_mesh
from passes.ir.errors import ConfigError
from passes.ir.plan import Plan

DevicesArgument = int | Sequence[str | torch.device] | Cluster | DeviceMesh | None
"""The types of ``devices=``."""


@dataclass(frozen=True)
class Placement:
    """Devices of ranks.

    Attributes:
        devices: one for each rank.
        cluster: the hardware, if the caller passed a ``Cluster``.
        processes: the number of the process of each rank, if the caller passed a ``DeviceMesh``; None: all processes in order.
    """

    devices: tuple[torch.device, ...]
    cluster: Cluster | None
    processes: tuple[int, ...] | None = None


Devices = tuple[torch.device, ...]


def implied_devices(cluster: Cluster | str | None, mode: str | Mapping[str, int | Sequence[int]], plan: Plan | None = None) -> int | None:
    """Return the number of ranks where ``devices=`` is left out: that of the plan, the cluster or the mesh; None: all accelerators."""
    if plan is not None:
        return plan.n_ranks
    hardware = read_cluster(cluster)
    if hardware is not None:
        return len(hardware.devices)
    return ranks_of_mesh(mode) if isinstance(mode, Mapping) else None


def resolve_devices(devices: DevicesArgument, world_size: int | None, local_world_size: int | None = None) -> Placement:
    """Return the device of each rank.

    A number takes accelerators if there are enough of them, else the CPU for all ranks. Under torchrun the device of a rank is ``cuda``
    without an index: the accelerator that torchrun assigns to the process (``LOCAL_RANK``). A plan then reads the same on all ranks. On
    clusters where each process sees a single accelerator, name it: ``devices=["cuda:0"] * n``.

    Args:
        world_size: number of processes of the model, each of them a rank; None: all ranks are in this process.
        local_world_size: number of processes on this machine; None: all.

    Raises:
        ConfigError: no devices, or not as many as there are processes.
    """
    cluster = devices if isinstance(devices, Cluster) else None
    n_local = None if world_size is None else local_world_size or world_size
    if devices is None:
        of_ranks = _all_accelerators(world_size, n_local)
    elif isinstance(devices, bool) or (isinstance(devices, int) and devices < 1):
        raise ConfigError(f"devices={devices!r}: there must be at least one device", remedy="pass devices=1 or more")
    elif isinstance(devices, int):
        check_count(devices)
        of_ranks = _first_devices(devices, world_size, n_local)
    elif isinstance(devices, Cluster):
        of_ranks = _first_devices(len(devices.devices), world_size, n_local)
    elif isinstance(devices, DeviceMesh):
        of_ranks = _devices_of_mesh(devices, world_size)
    else:
        of_ranks = tuple(_device(name, world_size) for name in devices)
    if not of_ranks:
        raise ConfigError("devices is empty: there must be at least one device", remedy='pass devices=4, or devices=["cuda:0", "cuda:1"]')
    if world_size is not None and len(of_ranks) != world_size:
        raise ConfigError(
            f"{len(of_ranks)} devices were asked for and there are {world_size} processes",
            remedy=f"pass devices={world_size}, or start torchrun with --nproc-per-node {len(of_ranks)},\n"
            f"or pass a DeviceMesh over {len(of_ranks)} of the processes"
            if len(of_ranks) < world_size
            else f"pass devices={world_size}, or start torchrun with --nproc-per-node {len(of_ranks)}",
        )
    return Placement(of_ranks, cluster, processes_of(devices) if isinstance(devices, DeviceMesh) else None)


def hardware_of(devices: Sequence[torch.device]) -> Cluster:
    """Return the hardware preset of these devices: by the name of the first GPU (unknown: A100 40 GB), else a laptop's CPU for each."""
    if all(device.type == "cuda" for device in devices):
        name = torch.cuda.get_device_name(devices[0]).lower()
        for words, preset in _GPU_NAMES:
            if all(word in name for word in words):
                return Cluster.preset(preset, nodes=1, devices_per_node=len(devices))
        return Cluster.preset("a100-40gb", nodes=1, devices_per_node=len(devices))
    return Cluster.preset("cpu", nodes=1, devices_per_node=len(devices))


_GPU_NAMES = (
    (("h200",), "h200"),
    (("h100",), "h100"),
    (("a100", "80gb"), "a100-80gb"),
    (("a100",), "a100-40gb"),
    (("v100",), "v100"),
    (("l4",), "l4"),
    (("4090",), "rtx-4090"),
)
"""Words in a GPU's name -> preset."""


def _all_accelerators(world_size: int | None, n_local: int | None) -> Devices:
    """Return one device for each process; in a single process, every accelerator, or raise ConfigError if there is none."""
    if world_size is not None:
        return _first_devices(world_size, world_size, n_local)
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(
            "devices=None means all accelerators, and there are none",
            remedy='pass devices=4 to run four ranks on the CPU, or cluster="h100:1x4" to plan for hardware',
        )
    return tuple(torch.device("cuda", index) for index in range(count))


def _devices_of_mesh(mesh: DeviceMesh, world_size: int | None) -> Devices:
    """Return the device of each rank of a mesh: in one process, the accelerators with the numbers in the mesh."""
    if mesh.device_type != "cuda":
        return (_device(mesh.device_type, world_size),) * mesh.size()
    if torch.cuda.device_count() == 0:
        raise ConfigError(
            "the device mesh is one of cuda devices, and there are none",
            remedy='make it of another kind, DeviceMesh("cpu", ...), and pass cluster= to plan for the hardware that it stands for',
        )
    if world_size is not None:
        return (torch.device("cuda"),) * mesh.size()
    return tuple(_device(f"cuda:{number}", None) for number in processes_of(mesh))


def _first_devices(count: int, world_size: int | None, n_local: int | None) -> Devices:
    """Return the first accelerators, or the CPU for all ranks if this machine has too few."""
    needed = count if n_local is None else n_local
    if torch.cuda.device_count() < needed:
        return (torch.device("cpu"),) * count
    return tuple(torch.device("cuda", index) if world_size is None else torch.device("cuda") for index in range(count))


def _device(name: str | torch.device, world_size: int | None) -> torch.device:
    """Return the device of a name: ``"cuda"`` is ``cuda:0``, but under torchrun that of the process."""
    if world_size is not None and str(name) == "cuda":
        return torch.device(name)
    device = parse_device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
