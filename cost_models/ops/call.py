"""The arguments of a call in numbers: to run it, and to price it at the sizes of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import sympy
import torch

from passes.ir.tensor_spec import TensorSpec
from passes.rules.call import Call


def arguments_with(call: Call, tensor: Callable[[str, TensorSpec], Any], device: torch.device) -> dict[str, Any]:
    """Parameter -> argument with tensors and devices replaced, to run the call.

    Args:
        tensor: makes a tensor from the parameter's name and the shape.
    """
    return {name: _filled(value, partial(tensor, name), device) for name, value in call.values}


def at_numbers(call: Call, numbers: Any) -> Call:
    """Return the call with symbolic sizes evaluated as ``numbers[size]``."""
    outputs = tuple(_evaluated(output, numbers) for output in call.outputs)
    return Call.numbered(call.operator, [(name, _evaluated(value, numbers)) for name, value in call.values], outputs)


def _filled(value: Any, tensor: Callable[[TensorSpec], Any], device: torch.device) -> Any:
    if isinstance(value, tuple):
        return [_filled(item, tensor, device) for item in value]
    if isinstance(value, torch.device):
        return device
    return tensor(value) if isinstance(value, TensorSpec) else value


def _evaluated(value: Any, numbers: Any) -> Any:
    if isinstance(value, TensorSpec):
        return TensorSpec(tuple(int(numbers[size]) for size in value.shape), value.dtype)
    if isinstance(value, tuple):
        return tuple(_evaluated(each, numbers) for each in value)
    return int(numbers[value]) if isinstance(value, sympy.Basic) else value
