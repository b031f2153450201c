"""The norm of all gradients of a model whose parameters are sharded and replicated over processes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from partitioner.runtime.state.part_gradient import NormShare, plain


class ModelNorm:
    """The gradient norm of a whole model, also for ``torch.nn.utils.clip_grad_norm_``, which asks each gradient (``part_gradient``).

    Args:
        original: the model; the norm has the promoted dtype of its parameters, also on a rank that owns none.

    Attributes:
        read_alone: see ``TotalNorm``.
    """

    def __init__(self, original: nn.Module, state: State, runtime: Runtime) -> None:
        dtypes = [parameter.dtype for parameter in original.parameters()] or [torch.get_default_dtype()]
        self.read_alone: set[int] = set()
        self._dtype = functools.reduce(torch.promote_types, dtypes).to_real()
        self._state = state
        self._runtime = runtime
        owned = {id(tensor) for name in self._names() for _, tensor in state.owned(name)}
        for stored in state.stored_parameters():
            stored.share = NormShare(self, id(stored.parameter) in owned)

    def of_gradients(self, norm_type: float) -> Tensor:
        """Return the norm of all gradients; each block of a parameter is counted once, by the rank that owns it."""
        owned = [plain(tensor.grad) for name in self._names() for _, tensor in self._state.owned(name) if tensor.grad is not None]
        return self.of([torch.linalg.vector_norm(gradient, norm_type) for gradient in owned], norm_type)

    def of(self, norms: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm over all processes, from the norms of the gradients that this one counts. All ranks must call it."""
        zero = torch.zeros((), dtype=self._dtype, device=self._runtime.devices[self._runtime.local_ranks[0]])
        stacked = torch.stack([zero, *(norm.to(zero) for norm in norms)])
        if norm_type == float("inf"):
            return self._runtime.reduce(stacked.max(), "max")
        return self._runtime.reduce((stacked**norm_type).sum(), "sum") ** (1.0 / norm_type)

    def _names(self) -> Iterable[str]:
        return dict.fromkeys(map(self._state.first_name, self._state.parameter_names))


def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, whose norm is ``norm``, so that it is at most ``max_norm``."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
