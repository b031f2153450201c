"""The loss of a random program: what it returns, changed in place by its caller, and what it keeps on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.programs.program import Program, loss_of
from tests.fuzz.programs.structures import leaves_of


def kept_value(model: nn.Module, place: str) -> Any:
    """Return the value kept at a place, such as ``keeps3.l_aux``."""
    return eval(f"model.{place}", {"model": model})  # noqa: S307  text of our own


def check_changes(program: Program, output: Any) -> None:
    """Check that PyTorch defines the changes of a result in place.

    Raises:
        RuntimeError: elements of a changed leaf share memory, as those of ``unfold`` may. PyTorch raises only where a stride is 0.
    """
    for leaf in (leaves_of(output)[place] for place, _ in program.usage.changes):
        if isinstance(leaf, Tensor):
            addresses = torch.arange(leaf.untyped_storage().nbytes()).as_strided(leaf.shape, leaf.stride())
            if addresses.unique().numel() < leaf.numel():
                raise RuntimeError("elements of the changed tensor share memory")


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
