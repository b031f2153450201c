"""Keep autograd out of a trace: ignore the hooks of checkpoints, refuse other hooks and gradients that forward asks for, by name.

PyTorch calls hooks from its autograd engine, and takes gradients by it; a graph has none. ``torch.export`` forgets hooks on tensors, and
what hooks on saved tensors do to gradients. Those of ``torch.utils.checkpoint`` would also leave nested checkpoints without gradients,
since they change the mode of gradients while the model runs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partitioner.tracing.autograd.checkpoints import enter_checkpoint, leave_checkpoint

__all__ = ["AutogradUseError", "keep_autograd_out"]

_NOT_THE_MODEL = ("torch.", "partitioner.", "passes.")
"""Beginnings of the names of modules that may use autograd during a trace."""

_CHECKPOINT = "torch.utils.checkpoint"


class AutogradUseError(Exception):
    """Forward asks for something that only PyTorch's autograd engine does.

    Attributes:
        remedy: what to do instead.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        self.remedy = remedy
        super().__init__(problem)


@contextlib.contextmanager
def keep_autograd_out() -> Iterator[None]:
    """While active, let this thread call nothing by hooks: those of torch on saved tensors are ignored, all others refused.

    Which tensors are saved or recomputed is a decision of the plan. Gradients that forward takes are refused, too.
    """
    thread = threading.get_ident()

    def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_of_model = not str(sys._getframe(1).f_globals.get("__name__", "")).startswith(_NOT_THE_MODEL)  # noqa: SLF001
            if threading.get_ident() != thread or not (is_of_model or owner is saved_tensors_hooks):
                return original(*args, **kwargs)
            return replacement(*args, **kwargs)

        setattr(owner, name, call)
        stack.callback(setattr, owner, name, original)

    with contextlib.ExitStack() as stack:
        patch(saved_tensors_hooks, "__enter__", _ignore_or_refuse)
        patch(saved_tensors_hooks, "__exit__", _leave)
        patch(Tensor, "register_hook", _refuse_hook)
        patch(Tensor, "backward", _refuse_gradient)
        patch(torch.autograd, "grad", _refuse_gradient)
        patch(torch.autograd, "backward", _refuse_gradient)
        yield


def _ignore_or_refuse(hooks: saved_tensors_hooks) -> None:
    """Do nothing for hooks of torch, which return what they were given.

    Raises:
        AutogradUseError: they are somebody else's, and may return something else.
    """
    if not _module(hooks).startswith("torch."):
        raise AutogradUseError(
            f"keeps tensors for its backward through hooks of its own ({type(hooks).__name__}), which a graph does not call",
            "leave them out; recompute= says what is kept for the backward and what is computed again",
        )
    if _module(hooks) == _CHECKPOINT:
        enter_checkpoint()


def _leave(hooks: saved_tensors_hooks, *_: Any) -> None:
    if _module(hooks) == _CHECKPOINT:
        leave_checkpoint()


def _module(hooks: saved_tensors_hooks) -> str:
    """Return the name of the module in which the function that packs tensors is."""
    pack: Any = hooks.pack_hook
    return str(getattr(pack, "__module__", ""))


def _refuse_hook(*_: Any, **__: Any) -> None:
    """Raise AutogradUseError: a hook may replace the gradient."""
    raise AutogradUseError(
        "sets a hook on a tensor (register_hook), which a graph does not call",
        "to change a gradient, apply a torch.autograd.Function with that backward; to read one, return the tensor and ask "
        "torch.autograd.grad(loss, tensor)",
    )


def _refuse_gradient(*_: Any, **__: Any) -> None:
    """Raise AutogradUseError: a graph would hold the gradient as a constant."""
    raise AutogradUseError(
        "computes a gradient in its forward (torch.autograd.grad, backward()), which a graph cannot",
        "return what is differentiated, and compute the gradient outside of the model; or write the derivative out with tensor operations",
    )
