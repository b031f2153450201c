"""Memory of a device during training: parameters, gradients, optimizer state, activations, communication buffers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from passes.ir.errors import ConfigError, did_you_mean

OPTIMIZER_STATES: Mapping[str, int] = MappingProxyType(
    {
        "none": 0,
        "sgd": 0,
        "sgd_momentum": 1,
        "adagrad": 1,
        "lion": 1,
        "rmsprop": 1,
        "adadelta": 2,
        "adam": 2,
        "adamax": 2,
        "adamw": 2,
        "nadam": 2,
        "radam": 2,
    }
)
"""Optimizer -> tensors of the size and dtype of a parameter that it keeps for each parameter."""


def optimizer_states(optimizer: str) -> int:
    """Return the number of state tensors for each parameter; raise ConfigError for an unknown optimizer.

    >>> optimizer_states("adamw")
    2
    """
    if optimizer not in OPTIMIZER_STATES:
        remedy = f"{did_you_mean(optimizer, OPTIMIZER_STATES)}choose one of {', '.join(OPTIMIZER_STATES)}"
        raise ConfigError(f"the state of optimizer {optimizer!r} is not known", remedy=remedy)
    return OPTIMIZER_STATES[optimizer]


def training_bytes(size: int, dtype: torch.dtype, optimizer: str, *, mixed: bool = False) -> int:
    """Return the bytes that the optimizer holds for a parameter, besides the parameter and its gradient.

    Mixed precision keeps a float32 copy of a 16-bit parameter and its state in float32, and adds gradients up in float32 instead of
    16 bits (Micikevicius et al., "Mixed Precision Training", 2018; Megatron-LM): 18 bytes a parameter with Adam, all counted.

    Args:
        size: bytes of the parameter.
        dtype: of the parameter.
        optimizer: its name.
        mixed: whether 16-bit parameters are trained so.

    >>> training_bytes(2, torch.float16, "adamw", mixed=True), training_bytes(4, torch.float32, "adamw")
    (14, 8)
    """
    states = optimizer_states(optimizer)
    if not mixed or dtype.itemsize > 2:
        return states * size
    count = size // dtype.itemsize
    return count * (4 * (states + 1) + (4 - dtype.itemsize))
