"""Keep autograd out of a trace: ignore the hooks of checkpoints, refuse other hooks and gradients, record questions of its state.

PyTorch calls hooks from its autograd engine, and takes gradients by it; a graph has none. ``torch.export`` forgets hooks on tensors, and
what hooks on saved tensors do to gradients. Those of ``torch.utils.checkpoint`` would also leave nested checkpoints without gradients,
since they change the mode of gradients while the model runs.

A model may ask whether gradients are on, or whether a tensor requires one, and compute otherwise then. The trace has one answer: such a
model is traced for each.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partitioner.tracing.autograd.checkpoints import enter_checkpoint, leave_checkpoint, mark_selected

__all__ = ["GRADIENTS_ON", "AutogradUseError", "keep_autograd_out", "note_question"]

GRADIENTS_ON = "torch.is_grad_enabled()"
"""The question whether gradients are on."""

_QUESTIONS = ("requires_grad", "is_leaf")
"""Attributes of tensors that say what autograd does with them."""

_WITH_HOOKS = {
    "grad_fn": "reads the node of autograd that computed a tensor, for its hooks",
    "get_gradient_edge": "reads the node of autograd that computed a tensor, for its hooks",
    "retain_grad": "keeps the gradient of a tensor by a hook",
}
"""Functions and attributes that do not set a hook by themselves, and what for they are used."""

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


_questions: ContextVar[set[str] | None] = ContextVar("questions", default=None)


def note_question(name: str) -> None:
    """Note that what is traced now depends on the state of autograd: ``"Tensor.requires_grad"``."""
    found = _questions.get()
    if found is not None:
        found.add(name)


@contextlib.contextmanager
def keep_autograd_out() -> Iterator[set[str]]:
    """While active, let this thread call nothing by hooks: those of torch on saved tensors are ignored, all others refused.

    Which tensors are saved or recomputed is a decision of the plan. Gradients that forward takes are refused, too. Yields the set of
    questions that code of the model asks of the state of autograd, as they come.
    """
    questions, is_on = set[str](), torch.is_grad_enabled
    token = _questions.set(questions)

    def asked_whether_on() -> bool:
        questions.add(GRADIENTS_ON)
        return is_on()

    with contextlib.ExitStack() as stack:
        stack.callback(_questions.reset, token)
        stack.enter_context(mark_selected())
        patches = _Patches(stack)
        patches.replace(saved_tensors_hooks, "__enter__", _ignore_or_refuse, whoever_calls=True)
        patches.replace(saved_tensors_hooks, "__exit__", _leave, whoever_calls=True)
        for name in ("register_hook", "retain_grad", "register_post_accumulate_grad_hook"):
            patches.replace(Tensor, name, _refuse_hook(name))
        for name in ("register_multi_grad_hook", "get_gradient_edge"):
            patches.replace(torch.autograd.graph, name, _refuse_hook(name))
        patches.watch("grad_fn", _refuse_hook("grad_fn"))
        patches.replace(Tensor, "backward", _refuse_gradient)
        patches.replace(torch.autograd, "grad", _refuse_gradient)
        patches.replace(torch.autograd, "backward", _refuse_gradient)
        patches.replace(torch, "is_grad_enabled", asked_whether_on)
        for name in _QUESTIONS:
            patches.watch(name, functools.partial(questions.add, f"Tensor.{name}"))
        yield questions


class _Patches:
    """Replaces functions and attributes of torch for code of the model in this thread.

    Args:
        stack: puts them back when it closes.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._thread = threading.get_ident()
        self._imported = frozenset(sys.modules)

    def _is_of_model(self) -> bool:
        """Return whether the caller of the patched function belongs to the model."""
        caller = str(sys._getframe(2).f_globals.get("__name__", ""))  # noqa: SLF001
        return threading.get_ident() == self._thread and not caller.startswith(_NOT_THE_MODEL)

    def replace(self, owner: Any, name: str, replacement: Callable[..., Any], *, whoever_calls: bool = False) -> None:
        """Replace a function; ``whoever_calls``: also for code of torch."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():  # the body of a loop or branch, in which Dynamo reads this function
                return original(*args, **kwargs)
            if self._is_of_model() or (whoever_calls and threading.get_ident() == self._thread):
                return replacement(*args, **kwargs)
            return original(*args, **kwargs)

        is_inherited = name not in vars(owner)
        setattr(owner, name, call)
        self._stack.callback(*((delattr, owner, name) if is_inherited else (setattr, owner, name, original)))
        self._stack.callback(self._put_back, name, call, original)

    def _put_back(self, name: str, call: Callable[..., Any], original: Any) -> None:
        """Give a function to the modules that were imported meanwhile, and have its replacement by ``from ... import``."""
        for module in [sys.modules[each] for each in sys.modules.keys() - self._imported]:
            if vars(module).get(name) is call:
                setattr(module, name, original)

    def watch(self, name: str, notice: Callable[[], Any]) -> None:
        """Call a function when an attribute of a tensor is read."""
        original: Any = getattr(Tensor, name)

        def read(tensor: Tensor) -> Any:
            if self._is_of_model():
                notice()
            return original.__get__(tensor)

        setattr(Tensor, name, property(read, original.__set__))
        self._stack.callback(delattr, Tensor, name)  # the attribute of its base class comes back


def _ignore_or_refuse(hooks: saved_tensors_hooks) -> None:
    """Do nothing for hooks of torch, which return what they were given.

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


def _leave(hooks: saved_tensors_hooks, *_: Any) -> None:
    if _module(hooks) == _CHECKPOINT:
        leave_checkpoint()


def _module(hooks: saved_tensors_hooks) -> str:
    """Return the name of the module in which the function that packs tensors is."""
    pack: Any = hooks.pack_hook
    return str(getattr(pack, "__module__", ""))


def _refuse_hook(name: str) -> Callable[..., None]:
    """Return a function that raises AutogradUseError: a hook may replace the gradient."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AutogradUseError(
            f"{_WITH_HOOKS.get(name, 'sets a hook on a tensor')} ({name}), which a graph does not call",
            "to change a gradient, apply a torch.autograd.Function with that backward; to read one, return the tensor and ask "
            "torch.autograd.grad(loss, tensor)",
        )

    return refuse


def _refuse_gradient(*_: Any, **__: Any) -> None:
    """Raise AutogradUseError: a graph would hold the gradient as a constant."""
    raise AutogradUseError(
        "computes a gradient in its forward (torch.autograd.grad, backward()), which a graph cannot",
        "return what is differentiated, and compute the gradient outside of the model; or write the derivative out with tensor operations",
    )
