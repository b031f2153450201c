"""Operations of neural network layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from passes.analysis.batch.call import Call
from passes.analysis.batch.role import Role, Rows, Same
from passes.graph.schemas import packet

__all__ = ["convolution", "embedding", "instances", "normalized", "per_row", "recurrent", "spatial"]

aten = torch.ops.aten

_SPATIAL_RANK: dict[Any, int] = {
    aten.conv1d: 1, aten.conv2d: 2, aten.conv3d: 3, aten.conv_transpose1d: 1, aten.conv_transpose2d: 2, aten.conv_transpose3d: 3,
}  # fmt: skip


def per_row(*names: str) -> Callable[[Call], Role]:
    """Each row of the first dimension for itself; parameters are the same in every microbatch.

    Args:
        names: the arguments that have rows.
    """

    def rule(call: Call) -> Role:
        operands = [call[name] for name in names]
        tensors = [operand for operand in operands if isinstance(operand, torch.fx.Node)]
        return call.aligned({tensor: [0, *[None] * (call.rank(tensor) - 1)] for tensor in tensors})

    return rule


def convolution(call: Call) -> Role:
    """``(batch, channels, space*)``; without a batch, the first dimension is the channels."""
    source = call["input"]
    spatial_rank = _SPATIAL_RANK.get(packet(call.node.target)) or len(call["stride"])
    return per_row("input")(call) if call.rank(source) == spatial_rank + 2 else call.aligned({})


def instances(call: Call) -> Role:
    """Normalisation within each row of ``(batch, channels, space*)``; batch normalisation too, with its statistics per microbatch."""
    return per_row("input")(call)


def normalized(call: Call) -> Role:
    """Layer and root-mean-square normalisation: the last dimensions are needed whole."""
    return call.aligned({call["input"]: call.leading(call["input"], len(call["normalized_shape"]))})


def spatial(count: int) -> Callable[[Call], Role]:
    """The last dimensions are needed whole: pooling, upsampling, pixel shuffle."""

    def rule(call: Call) -> Role:
        source = call["self"] if "self" in call.arguments else call["input"]
        return call.aligned({source: call.leading(source, count)})

    return rule


def embedding(call: Call) -> Role:
    """Each index is looked up in a table that every microbatch has. Gradients scaled by how often that was done need all indices."""
    if call.get("scale_grad_by_freq"):
        return call.mixed
    return call.aligned({call["indices"]: call.leading(call["indices"], 0)})


def recurrent(call: Call) -> tuple[Role, ...] | Role:
    """``(length, batch, features)``, or the first two in the other order; states are ``(layers, batch, features)``."""
    source, states = call["input"], call["hx"]
    states = list(states) if isinstance(states, list | tuple) else [states]
    if call.rank(source) != 3 or any(call.role(part) not in (Same(), Rows(1)) for part in states):
        return call.mixed
    if any(not isinstance(call.role(part), Same) for part in call["params"]):
        return call.mixed
    expected = Rows(0 if call["batch_first"] else 1)
    if call.role(source) != expected:
        return call.mixed
    return (expected, *[Rows(1)] * len(states))
