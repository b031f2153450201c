"""Notice custom autograd functions while a model is traced.

``torch.export`` traces the forward of a ``torch.autograd.Function`` and forgets its backward: the gradient of the graph would silently be
that of the forward's operations. So a call that gradients may flow through is refused by name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from passes.ir.torch_private import tree_leaves

__all__ = ["CustomFunctionError", "refuse_custom_functions"]

_ALLOWED = ("torch._higher_order_ops", "torch._library.autograd")
"""Modules of torch whose functions are no problem: control flow is traced as one operation, and refused as that; an operation of
``torch.library`` keeps the backward that is registered for it."""


class CustomFunctionError(Exception):
    """A custom autograd function was called."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        super().__init__(f"{function.__module__}.{function.__qualname__}")


@contextlib.contextmanager
def refuse_custom_functions() -> Iterator[None]:
    """Raise CustomFunctionError when this thread applies a custom autograd function to values that carry gradients.

    The patch is in a base class, because ``Function.apply`` looks up ``super().apply`` at each call: bound copies of it are noticed too.
    """
    thread = threading.get_ident()
    base: Any = torch.autograd.Function.__mro__[1]
    if "apply" in vars(base):
        raise AssertionError(f"{base} defines apply: this version of torch calls custom autograd functions in another way")

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        is_checked = threading.get_ident() == thread and torch.is_grad_enabled() and not function.__module__.startswith(_ALLOWED)
        if is_checked and any(map(_is_differentiable, tree_leaves((args, kwargs)))):
            raise CustomFunctionError(function)
        return super(base, function).apply(*args, **kwargs)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
