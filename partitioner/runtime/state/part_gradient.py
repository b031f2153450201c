"""Gradient tensors in a process that has only part of the model: they refuse norms over several, which are not the model's norm.

    torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)      one norm over this process's gradients: refused
    sum(p.grad.data.pow(2).sum() for p in pm.parameters())    the same by hand: refused
    pm.clip_grad_norm_(1.0)                                   the norm over the whole model

Ops on the way to a norm give ``PartGradient``, ``BlockGradient`` or ``_PartNorm``; every other op gives plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from passes.ir.errors import ConfigError
from passes.ir.torch_private import DisableTorchFunctionSubclass, foreach_norm

__all__ = ["BlockGradient", "PartGradient", "plain"]


class PartGradient(Tensor):
    """The whole gradient of one parameter, in a process that does not have all parameters. Its own norm is right."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func in _BEFORE_NORM:
                return result.as_subclass(cls)
            if func in _COMBINING:
                return result.as_subclass(BlockGradient)
            if func in _NORMS and not isinstance(result, Tensor):
                return tuple(norm.as_subclass(_PartNorm) for norm in result)
            if func in _NORMS or (func in _REDUCTIONS and isinstance(result, Tensor) and result.dim() == 0):
                return result.as_subclass(_PartNorm)
            return result


class BlockGradient(PartGradient):
    """The gradient of a shard of a parameter, or several gradients in one tensor: no norm of it is meaningful."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _NORMS or func in _REDUCTIONS:
            _refuse(func)
        return super().__torch_function__(func, types, args, kwargs)


class _PartNorm(Tensor):
    """The norm, or another reduction, of one gradient: adding or stacking two of them would give a norm over this process alone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _COMBINING or (func in _ADDITIONS and all(isinstance(argument, _PartNorm) for argument in args[:2])):
            _refuse(torch.norm)
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(_PartNorm) if func in _BEFORE_NORM or func in _ADDITIONS else result


def plain(gradient: Tensor) -> Tensor:
    """Return the gradient as a plain tensor, without these checks."""
    if not isinstance(gradient, PartGradient):
        return gradient
    with DisableTorchFunctionSubclass():
        return gradient.as_subclass(Tensor)


def _refuse(func: Callable[..., Any]) -> NoReturn:
    """Raise ConfigError for a reduction over the gradients of this process alone."""
    name = "norm" if func in _NORMS else func.__name__
    raise ConfigError(
        f"a {name} over the gradients of this process is not the {name} of the model's gradient: other processes have the rest of it",
        remedy="pm.clip_grad_norm_(max_norm) takes the norm over all processes, each parameter counted once; "
        "pm.full_gradients() gives every gradient whole",
    )


def _functions(*names: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions of ``torch``, and the methods of ``Tensor``, with these names."""
    for namespace in (torch, Tensor):
        yield from filter(callable, (getattr(namespace, name, None) for name in names))


_NORMS = frozenset(
    {
        *(torch.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, Tensor.norm),
        foreach_norm,  # what torch.nn.utils.clip_grad_norm_ calls for tensors on an accelerator
    }
)
_REDUCTIONS = frozenset(
    _functions("sum", "mean", "std", "var", "dot", "vdot", "inner", "amax", "amin", "max", "min", "logsumexp", "prod", "median")
)
"""Reductions other than norms. ``isfinite`` and the like are not among them: they are meaningful for a shard."""
_BEFORE_NORM = frozenset(
    {
        Tensor.data.__get__,  # type: ignore[attr-defined]  # a descriptor
        *_functions("detach", "float", "double", "half", "bfloat16", "to", "cpu", "cuda", "flatten", "ravel", "reshape", "view", "view_as"),
        *_functions("abs", "square", "pow", "mul", "multiply", "__pow__", "__mul__", "__rmul__"),
    }
)
"""Ops that may come between a gradient and its norm. Copies are not among them: optimizers use them for their state."""
_ADDITIONS = frozenset(_functions("add", "__add__", "__radd__", "add_", "__iadd__"))
_COMBINING = frozenset({torch.stack, torch.cat, torch.hstack, torch.vstack, torch.concat})
"""Ops that combine gradients, or their norms, in one tensor, of which the norm is taken next."""
