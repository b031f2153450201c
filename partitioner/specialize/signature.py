"""The key of traces: the kind of a call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.torch_private import forward_ad_level, tree_flatten

_PLAIN = (bool, int, str, type(None))
"""Types of values that are equal if their type and ``==`` say so."""

_DENSE = (Tensor, nn.Parameter)
"""Classes of tensors whose kind, sizes and strides say all that a trace may depend on."""


@dataclass(frozen=True)
class Signature:
    """The kind of a call. Calls with equal signatures run the same trace, and match it in the same way.

    Attributes:
        modes: the flag ``training`` of every module.
        autocast: the dtype of the autocast around the call; None: there is none.
        structure: of the arguments.
        arguments: kind of each argument, sizes and gradient state of tensors among them (``kind_of``).
        tracked: whether gradients are on.
    """

    modes: tuple[bool, ...]
    autocast: torch.dtype | None
    structure: Hashable
    arguments: tuple[Hashable, ...]
    tracked: bool


@dataclass(frozen=True)
class Call:
    """A call of a partitioned model.

    Attributes:
        args, kwargs: the arguments.
        modes: the flag ``training`` of every module.
        tracked: whether gradients are on.
        leaves: the arguments, without their structure.
        signature: None where an argument has a value that is not compared: the call is matched anew.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    modes: tuple[bool, ...]
    tracked: bool
    leaves: Sequence[Any]
    signature: Signature | None


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], modes: tuple[bool, ...], device_type: str, *, tracked: bool) -> Call:
    """Return a call with its signature.

    Args:
        device_type: of the model: the autocast of this type counts.
        tracked: whether gradients are on.
    """
    leaves, structure = _flat(args, kwargs)
    kinds = tuple(map(kind_of, leaves))
    if None in kinds:
        return Call(args, kwargs, modes, tracked, leaves, None)
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return Call(args, kwargs, modes, tracked, leaves, Signature(modes, autocast, structure, kinds, tracked))


def kind_of(leaf: object) -> Hashable:
    """Return class, dtype, device, sizes, strides and gradient state of a tensor, type and value of anything else.

    None where these do not say all: for other objects, and tensors of other classes or layouts; and in forward-mode differentiation.
    """
    kind = type(leaf)
    if kind in _DENSE:
        assert isinstance(leaf, Tensor)
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or forward_ad_level() >= 0:
            return None
        return kind, leaf.dtype, leaf.device, leaf.shape, leaf.stride(), leaf.requires_grad
    if kind in _PLAIN:
        return kind, leaf
    return (float, repr(leaf)) if kind is float else None


def _flat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Hashable]:
    """Return the arguments without their structure, and the structure."""
    values = (*args, *kwargs.values())
    if all(type(value) in _DENSE for value in values):
        return values, (len(args), tuple(kwargs))
    return tree_flatten((args, dict(kwargs)))
