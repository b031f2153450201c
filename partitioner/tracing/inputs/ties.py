"""Find names of a model's parameters and buffers that mean the same tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import Tensor, nn

from passes.ir.errors import TraceError


def first_names(model: nn.Module) -> dict[str, str]:
    """Return name -> first name of the same tensor (itself, if it is the first), for all parameters and buffers.

    Order and first names are those of ``model.named_parameters()`` and ``model.named_buffers()``.
    """
    first: dict[tuple[object, ...], str] = {}
    return {name: first.setdefault(_tensor_key(tensor), name) for name, tensor in _named_tensors(model)}


def merged_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return a note for each tensor object that has the memory of another one: the two are trained as one parameter."""
    tensors = dict(_named_tensors(model))
    return tuple(
        f"{name} shares the memory of {first}: partitioned, the two are one parameter, with the sum of their gradients"
        for name, first in first_names(model).items()
        if tensors[name] is not tensors[first]
    )


def refuse_overlaps(model: nn.Module) -> None:
    """Raise TraceError when two tensors share part of their memory: on different ranks, writes to one would not reach the other."""
    regions = []  # (device, first byte, end, name, tensor)
    for name, tensor in _named_tensors(model):
        if not _has_memory(tensor):
            continue
        last_element = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = tensor.data_ptr() + (last_element + 1) * tensor.element_size()
        regions.append((str(tensor.device), tensor.data_ptr(), end, name, tensor))
    regions.sort(key=lambda region: region[:4])
    for (device, _, end, name, tensor), (other_device, start, _, other_name, other) in itertools.pairwise(regions):
        if device == other_device and start < end and _tensor_key(tensor) != _tensor_key(other):
            raise TraceError(
                f"{name} and {other_name} share part of their memory",
                remedy=f"give one of them memory of its own: {other_name} = {other_name}.clone(); or use one tensor for both",
            )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for one tensor object, and for two with the same memory, shape, strides and type."""
    if not _has_memory(tensor):
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), isinstance(tensor, nn.Parameter))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.numel() > 0
