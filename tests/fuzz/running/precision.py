"""The precisions of ``partition``: in which types a case then computes, and by how much its numbers may differ from the model's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

TRUE = {None: torch.float64, "32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}
"""Precision -> the type of parameters and inputs."""


def dtype_of(precision: str | None) -> torch.dtype:
    """Return the type of parameters and inputs."""
    return TRUE[precision]


def converted(model: nn.Module, precision: str | None) -> nn.Module:
    """Return a copy of the model in a precision."""
    model = copy.deepcopy(model)
    return model if precision is None else model.to(dtype_of(precision))


def unconverted(model: nn.Module, precision: str | None) -> nn.Module:
    """Return a copy of the model in the next larger type, which a precision converts back without rounding."""
    larger = {"bf16-true": torch.float32, "32-true": torch.float64}
    return copy.deepcopy(model).to(larger[precision]) if precision in larger else copy.deepcopy(model)


@contextlib.contextmanager
def default_dtype(precision: str | None) -> Iterator[None]:
    """Make inputs, and tensors that a model makes, in the type of a precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(precision))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def autocast(precision: str | None) -> Iterator[None]:
    """Compute as the unpartitioned model does in mixed precision, by the path of encoders that has gradients (``PRECISION_NOTE``)."""
    if precision != "bf16-mixed":
        yield
        return
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def noise_of(precision: str | None) -> float:
    """Return a relative change of inputs and parameters, some roundings large."""
    return 1e-14 if precision is None else _rounding(precision)


def margin_of(precision: str | None) -> float:
    """Return the allowed multiple of the model's own change under noise: twice for roundings."""
    return 10.0 if precision is None else 2.0


def tolerance_of(precision: str | None) -> float:
    """Return the tolerance of a value, relative to the largest element of its tensor; 1e-3 of it to the largest of all tensors compared."""
    return 1e-9 if precision is None else 8 * _rounding(precision)


def rounding_of(precision: str | None) -> float:
    """Return the tolerance relative to the largest intermediate number of the model, for sums whose terms cancel."""
    return noise_of(precision) / 10


def _rounding(precision: str) -> float:
    return torch.finfo(torch.float32 if precision == "32-true" else torch.bfloat16).eps
