"""Keep autograd out of a trace: ignore the hooks of checkpoints, refuse other hooks and gradients, record questions of its state.

PyTorch calls hooks from its autograd engine, and takes gradients by it; a graph has none. ``torch.export`` forgets hooks on tensors, and
what hooks on saved tensors do to gradients. Those of ``torch.utils.checkpoint`` would also leave nested checkpoints without gradients,
since they change the mode of gradients while the model runs. Which tensors are saved or recomputed is a decision of the plan.

A model may ask whether gradients are on, or whether a tensor requires one, and compute otherwise then. The trace has one answer: such a
model is traced for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partitioner.tracing.autograd.checkpoints import enter_checkpoint, leave_checkpoint

GRADIENTS_ON = "torch.is_grad_enabled()"
"""The question whether gradients are on."""

_QUESTIONS = {Tensor.requires_grad.__get__: "Tensor.requires_grad", Tensor.is_leaf.__get__: "Tensor.is_leaf"}  # type: ignore[attr-defined]
"""Calls that ask what autograd does with a tensor."""

_HOOKS = {
    Tensor.grad_fn.__get__: "grad_fn",  # type: ignore[union-attr]
    Tensor.retain_grad: "retain_grad",
    Tensor.register_hook: "register_hook",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
}
"""Calls that set a hook, or get what it is set on."""

_GRADIENTS = frozenset({Tensor.backward, torch.autograd.grad, torch.autograd.backward})

_WITH_HOOKS = {
    "grad_fn": "reads the node of autograd that computed a tensor, for its hooks",
    "get_gradient_edge": "reads the node of autograd that computed a tensor, for its hooks",
    "retain_grad": "keeps the gradient of a tensor by a hook",
}
"""Functions and attributes that do not set a hook by themselves, and their use."""

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


def is_grad_enabled_for(original: Callable[[], bool], questions: set[str]) -> Callable[[], bool]:
    """Return ``torch.is_grad_enabled`` that notes when code of the model asks."""

    def is_grad_enabled() -> bool:
        if _is_of_model(sys._getframe(2)):  # noqa: SLF001
            questions.add(GRADIENTS_ON)
        return original()

    return is_grad_enabled


def observe_autograd_use(function: Any, questions: set[str]) -> None:
    """Note a question that code of the model asks of autograd's state. To be called by the mode that sees the call of ``function``.

    Raises:
        AutogradUseError: the call sets a hook, which may replace the gradient, or takes a gradient, which would be a constant of a graph.
    """
    if function not in _QUESTIONS and function not in _HOOKS and function not in _GRADIENTS:
        return
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    name = _HOOKS.get(function, "")
    if frame is not None and frame.f_globals.get("__name__") == "torch.overrides":  # called by a function written in Python
        frame = frame.f_back and frame.f_back.f_back
    while function in _HOOKS and frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph":
        name, frame = frame.f_code.co_name, frame.f_back
    if not _is_of_model(frame):
        return
    if function in _QUESTIONS:
        questions.add(_QUESTIONS[function])
    elif function in _HOOKS:
        raise AutogradUseError(
            f"{_WITH_HOOKS.get(name, 'sets a hook on a tensor')} ({name}), which a graph does not call",
            "to change a gradient, apply a torch.autograd.Function with that backward; to read one, return the tensor and ask "
            "torch.autograd.grad(loss, tensor)",
        )
    else:
        raise AutogradUseError(
            "computes a gradient in its forward (torch.autograd.grad, backward()), which a graph cannot",
            "return what is differentiated, and compute the gradient outside of the model; or write the derivative out with tensor "
            "operations",
        )


def _is_of_model(frame: FrameType | None) -> bool:
    """Return whether a frame runs code of the model."""
    return frame is not None and not str(frame.f_globals.get("__name__", "")).startswith(_NOT_THE_MODEL)


def enter_hooks(hooks: saved_tensors_hooks) -> None:
    """Do nothing for hooks of torch, which return what they were given; begin the region of a checkpoint.

    Raises:
        AutogradUseError: they belong to other code, and may return something else.
    """
    if not _module(hooks).startswith("torch."):
        raise AutogradUseError(
            f"keeps tensors for its backward through hooks of its own ({type(hooks).__name__}), which a graph does not call",
            "leave them out; recompute= says what is kept for the backward and what is computed again",
        )
    if _module(hooks) == _CHECKPOINT:
        enter_checkpoint()


def leave_hooks(hooks: saved_tensors_hooks, *_: Any) -> None:
    """End the region of a checkpoint."""
    if _module(hooks) == _CHECKPOINT:
        leave_checkpoint()


def _module(hooks: saved_tensors_hooks) -> str:
    """Return the name of the module in which the function that packs tensors is."""
    pack: Any = hooks.pack_hook
    return str(getattr(pack, "__module__", ""))
