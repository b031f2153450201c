"""accelerate's functions that give all processes the values of one, where it counts one process and there are several.

broadcast, broadcast_object_list     reach all processes, as a name of the run or a seed must
gather, reduce, gather_object        of one process, as before: every process has the whole result

Scripts import these functions by name before there is a partitioned model, so that the functions themselves get other code, and no other
function takes their place.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from partitioner.integrations.accelerate.processes import counts_replicas

__all__ = ["broadcast_objects", "broadcast_tensors", "replace_functions"]

_own: dict[str, Callable[..., Any]] = {}
"""Name of a function of accelerate -> the function with its own code."""


@functools.cache
def replace_functions() -> None:
    """Give the functions other code, once."""
    from accelerate.utils import operations  # noqa: PLC0415  an optional package

    for function in (_broadcast, _broadcast_object_list):
        name = function.__name__.removeprefix("_")
        target = inspect.unwrap(getattr(operations, name))
        assert isinstance(target, types.FunctionType)
        _own[name] = types.FunctionType(target.__code__, target.__globals__, name, target.__defaults__, target.__closure__)
        target.__code__ = function.__code__


def broadcast_tensors(data: Any, from_process: int) -> Any:
    """Return tensors of one process, in any structure, on all processes."""
    if not counts_replicas():
        return _own["broadcast"](data, from_process)
    from accelerate.utils import recursively_apply  # noqa: PLC0415  an optional package

    def broadcast(tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, from_process)
        return tensor

    return recursively_apply(broadcast, data, error_on_other_type=True)


def broadcast_objects(objects: list[Any], from_process: int) -> list[Any]:
    """Replace objects on all processes by those of one; return the list."""
    if not counts_replicas():
        found: list[Any] = _own["broadcast_object_list"](objects, from_process)
        return found
    dist.broadcast_object_list(objects, from_process)
    return objects


# Code that runs with the names of accelerate's module: it imports what it calls.


def _broadcast(tensor: Any, from_process: int = 0) -> Any:
    from partitioner.integrations.accelerate.broadcasts import broadcast_tensors  # noqa: PLC0415

    return broadcast_tensors(tensor, from_process)


def _broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    from partitioner.integrations.accelerate.broadcasts import broadcast_objects  # noqa: PLC0415

    return broadcast_objects(object_list, from_process)
