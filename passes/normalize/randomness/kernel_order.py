"""Find memory orders of kernels that differ from their fake results.

    x       (4, 3, 7, 13), strides of a transpose
    y = batch_norm(x)       fake: the strides of x;  the kernel for CPU: row-major, or channels-last
    z = y + 1               fake: the strides of y

The order of memory decides which element gets which random number (``draw_order``). So the calls after such a kernel are checked again,
on fake tensors of numbers with the strides that it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.aliasing import tensors_of
from passes.graph.schemas import bound_arguments, packet
from passes.graph.symbolic_sizes import size_at
from passes.ir.torch_private import FakeTensorMode, tree_map_only

aten = torch.ops.aten


def suggested_format(given: Tensor) -> torch.memory_format:
    """Return channels-last for a channels-last tensor, else row-major, as ``Tensor::suggest_memory_format``."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.dim())
    if channels_last is None or given.is_contiguous() or not given.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format
    return channels_last


def _normalization_result(value: Any, bound: Mapping[str, Any]) -> Any:
    first, *others = value if isinstance(value, tuple | list) else (value,)
    made = first.clone(memory_format=suggested_format(bound["input"]))
    return (made, *others) if others else made


def _roll_result(value: Tensor, bound: Mapping[str, Any]) -> Tensor:
    """Roll as the kernel does: concatenate two slices, one dimension after the other."""
    for dim in bound["dims"] or ():
        first, second = bound["self"].tensor_split(2, dim)
        value = torch.cat((second, first), dim)
    return value


def _one_hot_result(value: Tensor, bound: Mapping[str, Any]) -> Tensor:  # noqa: ARG001  as for the others
    return value.contiguous()


_KERNELS: Mapping[Any, Callable[[Any, Mapping[str, Any]], Any]] = {
    aten._batch_norm_with_update: _normalization_result,  # noqa: SLF001
    aten._native_batch_norm_legit: _normalization_result,  # noqa: SLF001
    aten._native_batch_norm_legit_no_training: _normalization_result,  # noqa: SLF001
    aten.batch_norm: _normalization_result,
    aten.native_batch_norm: _normalization_result,
    aten.one_hot: _one_hot_result,
    aten.roll: _roll_result,
}
"""Operator -> its fake result as its kernel for CPU lays it out. ``tests/passes/graph/test_kernel_order.py`` looks for others."""


def kernel_values(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Return the nodes whose memory order differs from ``meta["val"]``; for each, its value as a fake tensor of numeric sizes."""
    found: dict[fx.Node, Any] = {}
    if not any(packet(node.target) in _KERNELS for node in graph.nodes):
        return found
    with FakeTensorMode():
        known: dict[fx.Node, Any] = {}

        def value_of(node: fx.Node) -> Any:
            if node in found:
                return found[node]
            if node not in known:
                known[node] = _of_numbers(node.meta["val"])
            return known[node]

        for node in graph.nodes:
            correct = _KERNELS.get(packet(node.target)) if any(each.device.type == "cpu" for each in tensors_of(node)) else None
            if node.op == "call_function" and (correct is not None or any(source in found for source in node.all_input_nodes)):
                value = _result(node, value_of, correct)
                if _strides(value) != _strides(value_of(node)):
                    found[node] = value
    return found


def _result(node: fx.Node, value_of: Callable[[fx.Node], Any], correct: Callable[[Any, Mapping[str, Any]], Any] | None) -> Any:
    assert callable(node.target)
    value = node.target(*fx.map_arg(node.args, value_of), **fx.map_arg(node.kwargs, value_of))
    if correct is None:
        return value
    return correct(value, {name: fx.map_arg(each, value_of) for name, each in bound_arguments(node).items()})


def _strides(value: Any) -> list[tuple[int, ...]]:
    strides: list[tuple[int, ...]] = []
    tree_map_only(Tensor, lambda each: strides.append(each.stride()), value)
    return strides


def _of_numbers(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return size_at(value, None, 2)
    return tree_map_only(Tensor, lambda each: of_numbers(each, each.device), value)


def of_numbers(value: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor with the strides of another, and numeric sizes."""
    sizes, strides = ([size_at(each, None, 2) for each in every] for every in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=device)
