"""Gradient accumulation without communication: ranks keep their parts of gradients until a later step sums them.

    step in no_sync      .grad = own part                                        nothing is sent
    step in no_sync      .grad = own part + own part                             nothing is sent
    step outside         .grad = sum over ranks of (.grad + own part)            one sum

A summed gradient that is already in ``.grad`` is divided among the ranks first, so that the later sum restores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class GradientSlot(Protocol):
    """The ``.grad`` of one parameter on one rank."""

    def add(self, gradient: Tensor, unsummed_over: Sequence[int] = ()) -> None:
        """Add a gradient to ``.grad``, as autograd does.

        Args:
            gradient: of the rank's part of the parameter; its memory may become that of ``.grad``.
            unsummed_over: the ranks among which this is one part of a sum; empty for a gradient that is summed.
        """

    def take_unsummed(self) -> Tensor | None:
        """Remove from ``.grad`` the unsummed part of earlier steps, and return it; None if there is none."""


class AddUnsummed(nn.Module):
    """Moves the unsummed parts of earlier steps from ``.grad`` into the gradients of this step, which are then summed and stored.

    Args:
        names: for each gradient the parameter's placeholder; None for one that needs no sum.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        super().__init__()
        self.names = tuple(names)
        self._slots: tuple[GradientSlot | None, ...] = ()

    def bind(self, slots: Mapping[str, GradientSlot]) -> None:
        self._slots = tuple(None if name is None else slots[name] for name in self.names)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_slots": ()}  # of the model that runs the program: a saved one is bound anew

    def forward(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = [None if slot is None else slot.take_unsummed() for slot in self._slots]
        return tuple(gradient if part is None else gradient + part for gradient, part in zip(gradients, parts, strict=True))
