"""The loss of a random program: what it returns, changed in place by its caller, and what it keeps on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.fuzz.programs.program import Program, loss_of
from tests.fuzz.programs.structures import leaves_of

__all__ = ["kept_value", "loss_function"]


def kept_value(model: nn.Module, place: str) -> Any:
    """Return the value kept at a place, such as ``keeps3.l_aux``."""
    return eval(f"model.{place}", {"model": model})  # noqa: S307  text of our own


def loss_function(program: Program, model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """Return the loss that a training loop with this model computes: ``loss_of``, with the changes and the terms of the program's usage.

    Args:
        model: on which the loss finds kept tensors.
    """
    usage = program.usage
    if not usage.changes and not usage.in_loss:
        return loss_of

    def loss(output: Any, target: Tensor) -> Tensor:
        for place, code in usage.changes:
            exec(code, {"leaf": leaves_of(output)[place]})  # noqa: S102  text of our own
        total = loss_of(output, target)
        for each in usage.in_loss:
            total = total + 0.3 * kept_value(model, each)
        return total

    return loss
