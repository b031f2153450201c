"""The operations that each backend of torch.distributed supports on each type of device.

    backend   cpu                       cuda
    gloo      all                       broadcast and all_reduce, through the host; newer releases have more, but no send and receive
    mpi       all but reduce_scatter    the same, if it was built with CUDA support
    nccl      none                      all

The documentation of torch.distributed ("Backends") lists what PyTorch implements; a test asks the installed gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from passes.ir.errors import ConfigError

BackendOperation = Literal["send_receive", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
"""The operations that programs need; a halo exchange consists of sends and receives."""

_ALL: frozenset[BackendOperation] = frozenset({"send_receive", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"})

BACKENDS: Mapping[str, Mapping[str, frozenset[BackendOperation]]] = MappingProxyType(
    {
        "gloo": {"cpu": _ALL, "cuda": frozenset({"broadcast", "all_reduce"})},
        "mpi": {"cpu": _ALL - {"reduce_scatter"}, "cuda": _ALL - {"reduce_scatter"}},
        "nccl": {"cuda": _ALL},
    }
)
"""Backend -> type of device -> operations."""


GATHERED_BYTES: Mapping[str, int] = MappingProxyType({"gloo": 2**18, "nccl": 0})
"""Backend -> total bytes up to which an all-reduce is an all-gather, after which each rank reduces."""


def default_backend(device_type: str) -> str:
    """Return the backend for a type of device: nccl for cuda, gloo for all others."""
    return "nccl" if device_type == "cuda" else "gloo"


def check_backend(backend: str, device_type: str, operation: BackendOperation) -> None:
    """Raise ConfigError, naming backends that support an operation, if this one does not."""
    if operation in BACKENDS.get(backend, {}).get(device_type, frozenset()):
        return
    able = [name for name, kinds in BACKENDS.items() if operation in kinds.get(device_type, frozenset())]
    raise ConfigError(
        f"the backend {backend!r} has no {operation} on {device_type} devices",
        remedy=f"start the processes with {' or '.join(able)}" if able else "run on another kind of device",
    )
