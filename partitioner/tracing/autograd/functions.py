"""Keep custom autograd functions as operators while a model is traced.

``torch.export`` traces the forward of a ``torch.autograd.Function`` and forgets its backward: the gradient of the graph would silently be
that of the forward's operations. So a call that gradients may flow through becomes one call of an operator that applies the function
(``passes.autograd.functions.operators``), once its forward and its backward are known to have a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from partitioner.tracing.autograd.checkpoints import in_checkpoint
from passes.autograd.functions.operators import (
    AppliedFunction,
    FunctionOperator,
    applied_function,
    function_operator,
    is_applying,
    operands_of,
)
from passes.autograd.functions.rules import Spec, joint_of_function, loops_of_function, why_not_followed
from passes.ir.errors import TraceError
from passes.ir.torch_private import FakeTensorMode, no_dispatch_modes, tree_leaves
from passes.rules.registry import derive_rule_by

_ALLOWED = ("torch._higher_order_ops", "torch._library.autograd", "torch._dynamo._trace_wrapped", "torch._functorch.autograd_function")
"""Modules of torch whose functions are no problem: control flow is traced as one operation; an operation of ``torch.library`` keeps the
backward that is registered for it; an index below ``vmap``, and what ``vmap`` makes of it, have that of their forward."""


class CustomFunctionError(Exception):
    """A custom autograd function was called that cannot be in a graph; ``reason`` is a clause about the function."""

    def __init__(self, function: type[torch.autograd.Function], reason: str) -> None:
        super().__init__(f"{function.__module__}.{function.__qualname__}, which {reason}")


def apply_as_operator(questions: set[str]) -> Any:
    """Return ``apply`` of the base class of autograd functions, which calls an operator where values carry gradients.

    ``Function.apply`` looks up ``super().apply`` at each call: bound copies of it call this one, too.

    Args:
        questions: gets what calls ask of the state of autograd.
    """
    thread = threading.get_ident()
    base: Any = torch.autograd.Function.__mro__[1]

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        is_kept = threading.get_ident() == thread and torch.is_grad_enabled() and not is_applying()
        if not is_kept or function.__module__.startswith(_ALLOWED):
            return super(base, function).apply(*args, **kwargs)
        if not any(map(_is_differentiable, tree_leaves((args, kwargs)))):
            with torch.no_grad():  # autograd disables gradients unseen: a forward that does so too would leave them off in the graph
                return super(base, function).apply(*args, **kwargs)
        if function is CheckpointFunction:
            questions.add("Tensor.requires_grad")
            return _call_in_checkpoint(*args)
        return _call_operator(function, args)

    return classmethod(apply)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _call_in_checkpoint(run: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    """Call what a reentrant checkpoint runs: the same values and gradients, which none have where no argument requires one."""
    with torch.set_grad_enabled(any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args)), in_checkpoint():
        return run(*args)


def _call_operator(function: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
    """Call the operator of a function.

    Raises:
        CustomFunctionError: its forward or its backward has no graph.
    """
    applied, operands = applied_function(function, args), operands_of(args)
    with no_dispatch_modes():
        try:
            kept = _operator(applied, operands)
        except CustomFunctionError:
            raise
        except Exception as error:
            raise CustomFunctionError(function, _reason(error)) from error
    return kept(operands)


def _reason(error: Exception) -> str:
    """Return why a function has no graph, as a clause."""
    cause = error.__cause__ if isinstance(error, TraceError) and error.__cause__ is not None else error
    first_line = str(cause).strip().partition("\n")[0]
    if "convert all Tensors to FakeTensors" in first_line:
        return "reads a tensor that is not among its arguments"
    return f"cannot be traced: {type(cause).__name__}: {first_line}"


def _operator(applied: AppliedFunction, operands: Sequence[Any]) -> FunctionOperator:
    """Return the operator of a function, whose forward and backward are traced on blank tensors of the sizes of this trace."""
    specs = tuple(_spec(operand) for operand in operands)
    with FakeTensorMode():
        blank = [spec if isinstance(spec, int) else torch.empty(spec[0], dtype=spec[1], device=applied.device) for spec in specs]
        blank = [_requires_gradient(value) for value in blank]
        results = applied.apply(blank)
    if not all(leaf is None or isinstance(leaf, Tensor) for leaf in tree_leaves(results)):
        raise CustomFunctionError(applied.function, "returns something other than tensors and None")
    kept = function_operator(applied, blank, results)
    reason = why_not_followed(joint_of_function(kept.overload, specs))
    if reason is not None:
        raise CustomFunctionError(applied.function, reason)
    derive_rule_by(kept.overload, loops_of_function)
    return kept


def _spec(operand: Any) -> Spec | int:
    """Return shape and dtype of a tensor, or the number of a size, as they are in this trace."""
    if isinstance(operand, Tensor):
        return tuple(map(_hint, operand.shape)), operand.dtype
    return _hint(operand)


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _requires_gradient(value: Any) -> Any:
    return value.requires_grad_() if _is_differentiable(value) else value
