"""Attributes that frameworks read of every model, and their values on a partitioned model.

hf_device_map                          accelerate and Trainer, before they prepare a model
_ddp_params_and_buffers_to_ignore      DistributedDataParallel, before it wraps a model

A DistributedDataParallel around a module that contains a partitioned model asks the module alone: the first call inside of it is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

    from partitioner.specialize.trace import Trace

_IS_ANSWERED: ContextVar[bool] = ContextVar("_IS_ANSWERED", default=False)
"""Whether a class of ``partitioner.integrations`` prepares a model, and its framework may read it."""


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Let a framework prepare models with ranks in several processes: a class of ours serves them."""
    token = _IS_ANSWERED.set(True)
    try:
        yield
    finally:
        _IS_ANSWERED.reset(token)


def _device_map(trace: Trace) -> Mapping[str, torch.device]:
    """Return where the ranks of this process are, if on several devices: accelerate and Trainer do not move or copy such a model.

    Raises:
        AttributeError: they are on one device.
        ConfigError: accelerate's own class, or Trainer, prepares a model with one rank a process.
    """
    runtime = trace.runtime
    if len(runtime.local_ranks) < runtime.n_ranks and not _IS_ANSWERED.get() and _accelerates_processes():
        _refuse_replicas()
    devices = {f"rank {rank}": runtime.devices[rank] for rank in runtime.local_ranks}
    if len(set(devices.values())) == 1:
        raise AttributeError("a partitioned model on one device of this process has no 'hf_device_map'")
    return devices


def _accelerates_processes() -> bool:
    """Return whether accelerate is set up for several processes."""
    state: Any = sys.modules.get("accelerate.state")
    return state is not None and state.is_initialized() and state.PartialState().num_processes > 1


def _refuse_replicas() -> NoReturn:
    """Raise ConfigError: accelerate would give each process rows of its own, and wrap the model in DistributedDataParallel."""
    from passes.ir.errors import ConfigError  # noqa: PLC0415  importing partitioner imports little

    raise ConfigError(
        "accelerate takes the processes for replicas of the model, and each of them has one rank of a partitioned model",
        remedy="from partitioner.integrations.accelerate import Accelerator; with Trainer, from partitioner.integrations.transformers "
        "import Trainer",
    )


def refuse_call_in_ddp(trace: Trace) -> None:
    """Raise ConfigError for a call in the forward of a DistributedDataParallel that has tensors of the partitioned model.

    Ignored tensors are not among them.
    """
    from passes.ir.torch_private import running_ddp  # noqa: PLC0415  importing partitioner imports little

    ddp = running_ddp()
    if ddp is None:
        return
    own = {id(tensor) for tensors in (trace.state.named_parameters(), trace.state.named_buffers()) for _, tensor in tensors}
    wrapped = (*ddp.module.named_parameters(), *ddp.module.named_buffers())
    if any(id(tensor) in own and name not in ddp.parameters_to_ignore for name, tensor in wrapped):
        _refuse_wrapping(trace)


def _refuse_wrapping(_trace: Trace) -> NoReturn:
    """Raise ConfigError: DistributedDataParallel would copy the part of the first process into all others."""
    from passes.ir.errors import ConfigError  # noqa: PLC0415  importing partitioner imports little

    raise ConfigError(
        "DistributedDataParallel around a partitioned model gives every process the parameters of the first, and each has its own",
        remedy='leave it out: partition(model, mode="data") reduces gradients itself, and inputs="local" is for loaders that deal out '
        'rows; with Lightning, the strategies of partitioner.integrations.lightning in place of "ddp"',
    )


ANSWERS: Mapping[str, Callable[[Trace], Any]] = MappingProxyType(
    {"hf_device_map": _device_map, "_ddp_params_and_buffers_to_ignore": _refuse_wrapping}
)
"""Attribute -> function of the trace that returns it."""
