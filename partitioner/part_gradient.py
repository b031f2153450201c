"""Gradients of a process that has a part of the model: their norms are not the model's, and who takes them for that is told.

    torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)      one norm over this process's gradients: refused
    pm.clip_grad_norm_(1.0)                                   the norm over the whole model

Everything else computes as with any tensor, and gives plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from passes.ir.errors import ConfigError

__all__ = ["BlockGradient", "PartGradient", "plain"]


class PartGradient(Tensor):
    """The whole gradient of one parameter, in a process that does not have all parameters. Its own norm is right."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's guide to subclasses has it
            result = func(*args, **(kwargs or {}))
            if func not in _NORMS:
                return result
            if isinstance(result, Tensor):
                return result.as_subclass(_PartNorm)
            return tuple(norm.as_subclass(_PartNorm) for norm in result)


class BlockGradient(PartGradient):
    """The gradient of a block of a parameter: a norm of it is a norm of nothing in the model."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _NORMS:
            _refuse()
        return super().__torch_function__(func, types, args, kwargs)


class _PartNorm(Tensor):
    """The norm of one gradient of several that processes share."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _TOGETHER:
            _refuse()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's guide to subclasses has it
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(_PartNorm) if func is Tensor.to else result


def plain(gradient: Tensor) -> Tensor:
    """The same gradient as a plain tensor."""
    if not isinstance(gradient, PartGradient):
        return gradient
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's guide to subclasses has it
        return gradient.as_subclass(Tensor)


def _refuse() -> NoReturn:
    raise ConfigError(
        "a norm over the gradients of this process is not the norm of the model's gradient: other processes have the rest of it",
        remedy="pm.clip_grad_norm_(max_norm) takes the norm over all processes, each parameter counted once",
    )


_NORMS = frozenset(
    {
        *(torch.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, Tensor.norm),
        torch._foreach_norm,  # noqa: SLF001  # what torch.nn.utils.clip_grad_norm_ calls for tensors on an accelerator
    }
)
_TOGETHER = frozenset({torch.stack, torch.cat, torch.hstack, torch.vstack, torch.concat})
"""What puts the norms of several gradients into one tensor, to take the norm of that."""
