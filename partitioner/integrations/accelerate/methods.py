"""Methods of ``Accelerator`` that do something else for a partitioned model with one rank a process; for other models they do as before.

prepare_model          no DistributedDataParallel around it: its programs reduce gradients; mixed precision as for any model
prepare_data_loader    an iterable data set is read by every process, where every rank passes the whole batch
save_state             the first process writes the states of all stages; all wait until it has
load_state             every process takes its part of them
check_trigger          whether any process has set it, and not this one alone
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from partitioner.integrations.accelerate.checkpoints import gathered_state, loading_gathered_state, model_in_processes, optimizer_state
from partitioner.integrations.accelerate.processes import counts_replicas, wait_for_all
from passes.ir.errors import ConfigError

__all__ = ["replace_methods", "replacing"]

Method = Callable[..., Any]
"""A method as it was."""


def replacing(owner: type, name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator of a function that takes a method's place, with the method as its first argument."""

    def replace(function: Callable[..., Any]) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return function(method, *args, **kwargs)

        setattr(owner, name, replaced)

    return replace


@functools.cache
def replace_methods() -> None:
    """Replace the methods, once."""
    from accelerate import Accelerator  # noqa: PLC0415  an optional package

    @replacing(Accelerator, "prepare_model")
    def _prepare_model(
        method: Method, accelerator: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        is_partitioned = model_in_processes(model) is not None
        return method(accelerator, model, device_placement=device_placement, evaluation_mode=evaluation_mode or is_partitioned)

    @replacing(Accelerator, "prepare_data_loader")
    def _prepare_data_loader(method: Method, accelerator: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if counts_replicas() and accelerator.dispatch_batches:
            raise ConfigError(
                "Accelerator(dispatch_batches=True) reads batches in the first process, and every rank of a partitioned model reads all",
                remedy='leave dispatch_batches=None; or partition(..., inputs="local")',
            )
        if counts_replicas() and isinstance(data_loader.dataset, IterableDataset):
            accelerator.dataloader_config.dispatch_batches = False
        return method(accelerator, data_loader, *args, **kwargs)

    @replacing(Accelerator, "save_state")
    def _save_state(method: Method, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        pm = next(filter(None, map(model_in_processes, accelerator._models)), None)  # noqa: SLF001
        if pm is None:
            return method(accelerator, *args, **kwargs)
        states = {str(index): (each, optimizer_state(pm, each)) for index, each in enumerate(accelerator._optimizers)}  # noqa: SLF001
        with gathered_state(**states):
            location = method(accelerator, *args, **kwargs)
        wait_for_all()
        return location

    @replacing(Accelerator, "load_state")
    def _load_state(method: Method, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        pm = next(filter(None, map(model_in_processes, accelerator._models)), None)  # noqa: SLF001
        with contextlib.ExitStack() as stack:
            if pm is not None:
                for optimizer in accelerator._optimizers:  # noqa: SLF001
                    stack.enter_context(loading_gathered_state(pm, optimizer))
            return method(accelerator, *args, **kwargs)

    @replacing(Accelerator, "check_trigger")
    def _check_trigger(method: Method, accelerator: Any) -> Any:
        if counts_replicas():
            flag = accelerator.flag_tensor
            accelerator.flag_tensor = torch.zeros((), dtype=torch.int64, device=accelerator.device) if flag is None else flag
            dist.all_reduce(accelerator.flag_tensor)
        return method(accelerator)
