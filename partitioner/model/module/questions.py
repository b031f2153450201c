"""What to do when a framework asks a partitioned model for an attribute that it asks every model for.

hf_device_map                          accelerate and Trainer, before they prepare anything; ``partitioner.integrations`` adds functions
_ddp_params_and_buffers_to_ignore      DistributedDataParallel, before it wraps a model

A DistributedDataParallel around a module that contains a partitioned model asks the module alone: the first call inside of it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

    from partitioner.model.session import Session

__all__ = ["ANSWERS", "WHEN_ASKED_FOR_DEVICE_MAP", "WHEN_MADE", "announce", "refuse_call_in_ddp"]

WHEN_ASKED_FOR_DEVICE_MAP: list[Callable[[Session], None]] = []
"""Functions that get the session of the model."""

WHEN_MADE: list[Callable[[Session], None]] = []
"""Functions that get the session of each new model, for frameworks that ask it nothing."""


def announce(session: Session) -> None:
    """Call the functions of ``WHEN_MADE`` for a new model."""
    for prepare in WHEN_MADE:
        prepare(session)


def _device_map(session: Session) -> Mapping[str, torch.device]:
    """Return where the ranks of this process are, if on several devices: accelerate and Trainer do not move or copy such a model.

    Raises:
        AttributeError: they are on one device.
    """
    for prepare in WHEN_ASKED_FOR_DEVICE_MAP:
        prepare(session)
    runtime = session.runtime
    devices = {f"rank {rank}": runtime.devices[rank] for rank in runtime.local_ranks}
    if len(set(devices.values())) == 1:
        raise AttributeError("a partitioned model on one device of this process has no 'hf_device_map'")
    return devices


def refuse_call_in_ddp(session: Session) -> None:
    """Raise ConfigError for a call in the forward of a DistributedDataParallel that has tensors of the partitioned model.

    Tensors that it was told to ignore are not among them.
    """
    from passes.ir.torch_private import running_ddp  # noqa: PLC0415  importing partitioner imports little

    ddp = running_ddp()
    if ddp is None:
        return
    own = {id(tensor) for tensors in (session.state.named_parameters(), session.state.named_buffers()) for _, tensor in tensors}
    wrapped = (*ddp.module.named_parameters(), *ddp.module.named_buffers())
    if any(id(tensor) in own and name not in ddp.parameters_to_ignore for name, tensor in wrapped):
        _refuse_wrapping(session)


def _refuse_wrapping(_session: Session) -> NoReturn:
    """Raise ConfigError: DistributedDataParallel would copy the part of the first process into all others."""
    from passes.ir.errors import ConfigError  # noqa: PLC0415  importing partitioner imports little

    raise ConfigError(
        "DistributedDataParallel around a partitioned model gives every process the parameters of the first, and each has its own",
        remedy='leave it out: partition(model, mode="data") reduces gradients itself, and inputs="local" is for loaders that deal out '
        'rows; with Lightning, the strategies of partitioner.integrations.lightning in place of "ddp"',
    )


ANSWERS: Mapping[str, Callable[[Session], Any]] = MappingProxyType(
    {"hf_device_map": _device_map, "_ddp_params_and_buffers_to_ignore": _refuse_wrapping}
)
"""Attribute -> function of the session that returns it."""
