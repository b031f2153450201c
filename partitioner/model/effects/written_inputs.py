"""Copy the new values of inputs into the caller's tensors, where forward writes its arguments.

    model(x, cache)     cache[:, 3] = ...                      writes the caller's tensor
    pm(x, cache)        cache.copy_(new value of cache)        after the programs of the call, on every rank that was given it

Programs read the tensors that they are given until the backward of the call: where autograd tracks it, they are given copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from partitioner.runtime.arguments import BoundInputs
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import is_view


def check_writable(graph: ModelGraph, inputs: BoundInputs) -> None:
    """Check the tensors that a call would write, before it runs.

    Raises:
        ConfigError: a tensor cannot be written in place; or it shares elements with another input, which the graph reads as another value.
    """
    names = {leaf.placeholder: leaf.name for leaf in graph.inputs}
    for placeholder, tensor in inputs.written.items():
        name = names[placeholder]
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigError(
                f"forward writes into its input {name}, of which several elements are one in memory: it is expanded",
                remedy=f"pass {name}.clone() or {name}.contiguous()",
            )
        if torch.is_grad_enabled() and _is_leaf(tensor):
            raise ConfigError(
                f"forward writes into its input {name}, a leaf tensor that requires a gradient, which autograd does not allow",
                remedy=f"pass {name}.clone(), or call under torch.no_grad()",
            )
        for other, value in inputs.tensors.items():
            if other != placeholder and _overlap(tensor, value):
                raise ConfigError(
                    f"forward writes into its input {name}, which shares memory with {names[other]}; they were apart in the trace",
                    remedy=f"pass a copy of one of them: {names[other]}.clone()",
                )


def _is_leaf(tensor: Tensor) -> bool:
    """Return whether a tensor that requires a gradient, or the base of its view, is a leaf."""
    base = tensor._base if is_view(tensor) else None  # noqa: SLF001  there is no other way to ask for it
    return tensor.requires_grad and (tensor.is_leaf or (base is not None and base.is_leaf))


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an element of memory."""
    if tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not tensor.numel() or not other.numel():
        return False
    if tensor.dtype != other.dtype:
        return True
    (begin, end), (other_begin, other_end) = _range(tensor), _range(other)
    if end <= other_begin or other_end <= begin:
        return False
    start = min(begin, other_begin)
    marks = torch.zeros(max(end, other_end) - start, dtype=torch.bool)
    marks.as_strided(tensor.shape, tensor.stride(), begin - start).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other_begin - start).any())


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the first element of a tensor in its memory, and the end."""
    begin = tensor.storage_offset()
    return int(begin), int(begin) + 1 + sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def with_copies(inputs: BoundInputs) -> BoundInputs:
    """Return the inputs with copies of those that will be written."""
    copies = {name: inputs.tensors[name].detach().clone() for name in inputs.written if name in inputs.tensors}
    return dataclasses.replace(inputs, tensors={**inputs.tensors, **copies})


def own_memory(values: Sequence[Tensor], inputs: BoundInputs) -> list[Tensor]:
    """Return the values of results, those in memory of inputs that will be written copied."""
    written = {tensor.untyped_storage().data_ptr() for tensor in inputs.written.values()}
    return [value.clone() if written and value.untyped_storage().data_ptr() in written else value for value in values]


def write_inputs(graph: ModelGraph, by_node: Mapping[str, Tensor], inputs: BoundInputs) -> None:
    """Copy the new values of inputs into the caller's tensors, as operations that autograd records.

    Raises:
        ConfigError: autograd does not allow to write a tensor in place.
    """
    for placeholder, tensor in inputs.written.items():
        output = graph.writes[placeholder]
        assert output.node is not None
        with torch.inference_mode(tensor.is_inference()):
            try:
                tensor.copy_(by_node[output.node])
            except RuntimeError as error:
                raise ConfigError(
                    f"forward writes into its input {output.name}, which autograd does not allow: {str(error).splitlines()[0]}",
                    remedy=f"pass {output.name}.clone(), or call under torch.no_grad()",
                ) from error
