"""What ``devices=`` means here: how many ranks, and where each one runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from cost_models.hardware.clusters import Cluster
from cost_models.hardware.devices import check_count, parse_device
from passes.ir.errors import ConfigError

__all__ = ["DevicesArgument", "Placement", "hardware_of", "resolve_devices"]

DevicesArgument = int | Sequence[str | torch.device] | Cluster | DeviceMesh | None
"""What a caller may pass as ``devices``."""


@dataclass(frozen=True)
class Placement:
    """Where ranks run.

    Attributes:
        devices: for each rank, where it runs.
        cluster: the hardware that the caller described, if any.
    """

    devices: tuple[torch.device, ...]
    cluster: Cluster | None


Devices = tuple[torch.device, ...]


def resolve_devices(devices: DevicesArgument, world_size: int | None, local_world_size: int | None = None) -> Placement:
    """For each rank, where it runs.

    A number takes accelerators while there are enough of them, else the CPU for all ranks. Ranks in processes of their own run on
    ``cuda`` without a number: the accelerator that torchrun means for the process (``LOCAL_RANK``), on whichever machine it is. A plan
    then reads the same on all ranks. Where each process sees one accelerator alone, as some clusters have it, name it:
    ``devices=["cuda:0"] * n``.

    Args:
        world_size: processes, when launched by torchrun: each rank is one process.
        local_world_size: how many of them run on this machine; None: all.

    Raises:
        ConfigError: no devices, or not as many as there are processes.
    """
    cluster = devices if isinstance(devices, Cluster) else None
    here = None if world_size is None else local_world_size or world_size
    if devices is None:
        found = _accelerators(world_size, here)
    elif isinstance(devices, bool) or (isinstance(devices, int) and devices < 1):
        raise ConfigError(f"devices={devices!r}: there must be at least one device", remedy="pass devices=1 or more")
    elif isinstance(devices, int):
        check_count(devices)
        found = _some(devices, world_size, here)
    elif isinstance(devices, Cluster):
        found = _some(len(devices.devices), world_size, here)
    elif isinstance(devices, DeviceMesh):
        found = _some(devices.size(), world_size, here, devices.device_type)
    else:
        found = tuple(_device(name, world_size) for name in devices)
    if not found:
        raise ConfigError("devices is empty: there must be at least one device", remedy='pass devices=4, or devices=["cuda:0", "cuda:1"]')
    if world_size is not None and len(found) != world_size:
        raise ConfigError(
            f"{len(found)} devices were asked for and there are {world_size} processes",
            remedy=f"pass devices={world_size}, or start torchrun with --nproc-per-node {len(found)}",
        )
    return Placement(found, cluster)


def hardware_of(devices: Sequence[torch.device]) -> Cluster:
    """The preset that describes these devices best: by name for GPUs that have one, else a laptop's CPU for each rank."""
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
"""Words in the name that the driver gives -> preset."""


def _accelerators(world_size: int | None, here: int | None) -> Devices:
    if world_size is not None:
        return _some(world_size, world_size, here)
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("devices=None means all accelerators, and there are none", remedy="pass devices=4 to run four ranks on the CPU")
    return tuple(torch.device("cuda", index) for index in range(count))


def _some(count: int, world_size: int | None, here: int | None, kind: str | None = None) -> Devices:
    needed_here = count if here is None else here
    if kind == "cpu" or torch.cuda.device_count() < needed_here:
        return (torch.device("cpu"),) * count
    return tuple(torch.device("cuda", index) if world_size is None else torch.device("cuda") for index in range(count))


def _device(name: str | torch.device, world_size: int | None) -> torch.device:
    if world_size is not None and str(name) == "cuda":
        return torch.device(name)
    device = parse_device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
