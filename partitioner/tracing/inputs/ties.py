"""Which names of a model's parameters and buffers mean the same tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import Tensor, nn

from passes.ir.errors import TraceError

__all__ = ["first_names", "merged_parameters", "refuse_overlaps"]


def first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer, the first name of the same tensor (its own, when it is the first).

    Order and first names are those of ``model.named_parameters()`` and ``model.named_buffers()``.
    """
    first: dict[tuple[object, ...], str] = {}
    return {name: first.setdefault(_identity(tensor), name) for name, tensor in _named_tensors(model)}


def merged_parameters(model: nn.Module) -> tuple[str, ...]:
    """One sentence for each parameter that lies in the memory of another without being it: the two are trained as one."""
    tensors = dict(_named_tensors(model))
    return tuple(
        f"{name} lies in the memory of {first}: partitioned, the two are one parameter, with the sum of their gradients"
        for name, first in first_names(model).items()
        if tensors[name] is not tensors[first]
    )


def refuse_overlaps(model: nn.Module) -> None:
    """Raise TraceError when two tensors share part of their memory: placed apart, one would no longer see what is written to the other."""
    regions = []
    for name, tensor in _named_tensors(model):
        if not _has_memory(tensor):
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        regions.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), name, tensor))
    regions.sort(key=lambda region: region[:4])
    for (device, _, end, name, tensor), (other_device, start, _, other_name, other) in itertools.pairwise(regions):
        if device == other_device and start < end and _identity(tensor) != _identity(other):
            raise TraceError(
                f"{name} and {other_name} share part of their memory",
                remedy=f"give one of them memory of its own: {other_name} = {other_name}.clone(); or use the very same tensor for both",
            )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for one tensor, and for two that lie in all of the same memory in the same way."""
    if not _has_memory(tensor):
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), isinstance(tensor, nn.Parameter))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.numel() > 0
