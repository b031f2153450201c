"""The norm of all gradients of a model whose parameters are sharded and replicated over processes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from partitioner.runtime.state.part_gradient import plain

__all__ = ["gradient_norm", "scale_gradients"]


def gradient_norm(original: nn.Module, state: State, runtime: Runtime, norm_type: float) -> Tensor:
    """Return the gradient norm of the whole model; each block of a parameter is counted once, by the rank that owns it.

    Args:
        original: the model; the norm has the promoted dtype of its parameters, also on a rank that owns none.
    """
    names = dict.fromkeys(state.graph.aliases.get(name, name) for name in state.parameter_names)
    owned = [plain(tensor.grad) for name in names for _, tensor in state.owned(name) if tensor.grad is not None]
    dtypes = [parameter.dtype for parameter in original.parameters()] or [torch.get_default_dtype()]
    dtype = functools.reduce(torch.promote_types, dtypes).to_real()
    zero = torch.zeros((), dtype=dtype, device=runtime.devices[runtime.local_ranks[0]])
    norms = torch.stack([zero, *(torch.linalg.vector_norm(gradient, norm_type).to(zero) for gradient in owned)])
    if norm_type == float("inf"):
        return runtime.reduce(norms.max(), "max")
    return runtime.reduce((norms**norm_type).sum(), "sum") ** (1.0 / norm_type)


def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, whose norm is ``norm``, so that it is at most ``max_norm``."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
