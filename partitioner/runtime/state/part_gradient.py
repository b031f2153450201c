"""Gradient tensors in a process that has only part of the model. Norms over several are norms of the model's gradient, or refused.

    torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)      the norm over all processes, each parameter counted once
    sum(p.grad.data.pow(2).sum() for p in pm.parameters())    a sum over this process by hand: refused
    p.grad.norm()                                             right of a whole parameter; of a shard: refused
    sum(p.grad.norm().item() ** 2 for p in pm.parameters())   numbers say nothing of where they are from: one warning

Ops on the way to a norm give ``PartGradient``, ``BlockGradient``, ``_PartNorm`` or ``_StackedNorms``; every other op gives plain tensors.

    vector_norm(p.grad, 2) -> _PartNorm or _BlockNorm; torch.stack(them) -> _StackedNorms; vector_norm(stacked, 2) -> over all processes
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from passes.ir.errors import ConfigError, PartitionWarning, level_of_caller
from passes.ir.torch_private import DisableTorchFunctionSubclass, foreach_norm


class TotalNorm(Protocol):
    """Combines norms of all processes.

    Attributes:
        read_alone: identities of the shares of gradients whose norms were turned into numbers, one by one.
    """

    read_alone: set[int]

    def of(self, norms: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the whole, from those of the gradients that this process counts. All ranks must call it."""


@dataclass(frozen=True)
class NormShare:
    """Contribution of a gradient to the norm over all processes.

    Attributes:
        total: combines the norms of the model.
        is_counted: whether this process counts the gradient; another one that holds the same block does otherwise.
    """

    total: TotalNorm
    is_counted: bool


class PartGradient(Tensor):
    """The whole gradient of one parameter, in a process that does not have all parameters. Its own norm is right."""

    share: NormShare | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func in _BEFORE_NORM:
                return _like(args[0], result.as_subclass(cls))
            if func in _COMBINING:
                return result.as_subclass(BlockGradient)
            if func is foreach_norm:
                power = _power(func, args, kwargs)
                return tuple(_norm(gradient, norm, power) for gradient, norm in zip(args[0], result, strict=True))
            if func in _NORMS:
                return _norm(args[0], result, _power(func, args, kwargs))
            if func in _REDUCTIONS and isinstance(result, Tensor) and result.dim() == 0:
                return _marked(result.as_subclass(_PartNorm), args[0])
            return result


class BlockGradient(PartGradient):
    """The gradient of a shard of a parameter, or several gradients in one tensor: a norm of it alone is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _REDUCTIONS:
            _refuse(func)
        return super().__torch_function__(func, types, args, kwargs)


class _PartNorm(Tensor):
    """The norm, or another reduction, of one gradient: adding two of them would give a norm over this process alone."""

    share: NormShare | None = None
    power: float | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.stack:
            return _stacked(args[0], *args[1:], **(kwargs or {}))
        if func in _COMBINING or (func in _ADDITIONS and all(isinstance(argument, _PartNorm) for argument in args[:2])):
            _refuse(torch.norm)
        if func in _NUMBERS:
            _note_number(args[0])
        with DisableTorchFunctionSubclass():
            if func is Tensor.__format__:
                return format(args[0].as_subclass(Tensor), *args[1:])
            result = func(*args, **(kwargs or {}))
            if func in _MOVES:
                return _like(args[0], result.as_subclass(cls))
            return _marked(result.as_subclass(_PartNorm), args[0]) if func in _BEFORE_NORM or func in _ADDITIONS else result


class _BlockNorm(_PartNorm):
    """The norm of a shard: it has no meaning but as part of the norm over all processes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not torch.stack and func not in _MOVES and not _is_getter(func):
            _refuse(torch.norm)
        return super().__torch_function__(func, types, args, kwargs)


class _StackedNorms(Tensor):
    """The norms of this process's gradients in one tensor. Their norm is that over all processes; anything else is refused."""

    shares: Sequence[NormShare] = ()
    power: float = 0.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if _is_getter(func):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        stacked = args[0]
        if func not in _NORMS or not isinstance(stacked, _StackedNorms) or _power(func, args, kwargs or {}) != stacked.power:
            _refuse(torch.norm)
        with DisableTorchFunctionSubclass():
            norms = stacked.as_subclass(Tensor).unbind()
        counted = [norm for norm, share in zip(norms, stacked.shares, strict=True) if share.is_counted]
        return stacked.shares[0].total.of(counted, stacked.power)


def _norm(gradient: Any, norm: Tensor, power: float | None) -> Tensor:
    """Return the norm of a gradient as a tensor that may become part of the norm over all processes."""
    share = gradient.share if isinstance(gradient, PartGradient) else None
    if isinstance(gradient, BlockGradient) and (share is None or power is None):
        _refuse(torch.norm)
    if not isinstance(gradient, PartGradient):
        return norm
    marked = norm.as_subclass(_BlockNorm if isinstance(gradient, BlockGradient) else _PartNorm)
    marked.share, marked.power = share, power
    return marked


def _stacked(norms: Sequence[Any], dim: int = 0) -> Tensor:
    """Return norms of gradients in one tensor; refuse any other numbers, and norms of several models or of several orders."""
    shares = [norm.share for norm in norms if isinstance(norm, _PartNorm) and norm.share is not None and norm.power is not None]
    if len(shares) < len(norms) or len({(id(norm.share.total), norm.power) for norm in norms}) > 1:
        _refuse(torch.norm)
    with DisableTorchFunctionSubclass():
        stacked = torch.stack([norm.as_subclass(Tensor) for norm in norms], dim).as_subclass(_StackedNorms)
    stacked.shares, stacked.power = tuple(shares), norms[0].power
    return stacked


def _power(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """Return the order of a vector norm over all elements; None for any other norm."""
    if func not in _VECTOR_NORMS:
        return None
    given = {**dict(zip(_VECTOR_NORMS[func], args, strict=False)), **kwargs}
    order = given.get("ord", given.get("p", 2.0))
    if given.get("dim") is not None or given.get("keepdim"):
        return None
    return 2.0 if order in ("fro", None) else float(order)


def _like(source: Any, result: Any) -> Any:
    """Return a tensor that counts in norms over all processes as ``source`` does."""
    result.share = getattr(source, "share", None)
    if isinstance(source, _PartNorm):
        result.power = source.power
    return result


def _marked(result: Any, source: Any) -> Any:
    """Return a number that comes from one gradient, and is no norm of it."""
    result.share = getattr(source, "share", None)
    return result


def _note_number(norm: Any) -> None:
    """Warn where norms of two gradients of a model have become numbers: a sum of them is that of this process alone."""
    share = getattr(norm, "share", None)
    if share is None or id(share) in share.total.read_alone:
        return
    share.total.read_alone.add(id(share))
    if len(share.total.read_alone) == 2:
        warnings.warn(
            "norms of several gradients are read as numbers (item(), float()): each is right, but this process has a part of the model's "
            "parameters, and a norm or maximum of all numbers would be that of the part. pm.clip_grad_norm_(max_norm), or "
            "torch.nn.utils.get_total_norm([p.grad for p in pm.parameters()]), takes it over all processes",
            PartitionWarning,
            stacklevel=level_of_caller(),
        )


def _is_getter(func: Any) -> bool:
    """Return whether a function reads an attribute such as ``shape`` or ``device``."""
    return getattr(func, "__name__", "") == "__get__" and not inspect.isfunction(func)


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
        remedy="pm.clip_grad_norm_(max_norm), or torch.nn.utils.clip_grad_norm_, takes the norm over all processes, each parameter counted "
        "once; "
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
_VECTOR_NORMS: Mapping[Callable[..., Any], Sequence[str]] = {
    torch.linalg.vector_norm: ("x", "ord", "dim", "keepdim"),
    foreach_norm: ("tensors", "ord"),
    torch.norm: ("input", "p", "dim", "keepdim"),
    Tensor.norm: ("input", "p", "dim", "keepdim"),
}
"""Norms over all elements -> the names of their arguments."""
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
_MOVES = frozenset(_functions("to", "cpu", "cuda", "detach"))
"""Ops that leave the value of a norm unchanged."""
_NUMBERS = frozenset(_functions("item", "tolist", "numpy", "__float__", "__array__"))
"""Conversions of a tensor to Python numbers; ``torch.tensor([norm, norm])`` calls ``__float__``."""
_ADDITIONS = frozenset(_functions("add", "__add__", "__radd__", "add_", "__iadd__"))
_COMBINING = frozenset({torch.stack, torch.cat, torch.hstack, torch.vstack, torch.concat})
"""Ops that combine gradients, or their norms, in one tensor, of which the norm is taken next."""
