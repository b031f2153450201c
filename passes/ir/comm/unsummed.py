"""Where programs put gradients of parameters, and gradients that are not summed yet.

Ranks that compute on rows of their own may keep their parts until a later step sums them:

    step in no_sync      .grad = own part                                        nothing is sent
    step in no_sync      .grad = own part + own part                             nothing is sent
    step outside         .grad = sum over ranks of (.grad + own part)            one sum

A gradient that was summed before the first of them is divided among the ranks, so that the later sum gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

__all__ = ["AddUnsummed", "GradientSlot"]


class GradientSlot(Protocol):
    """Where the gradients that one rank computes for one parameter go."""

    def add(self, gradient: Tensor, unsummed_over: Sequence[int] = ()) -> None:
        """Add a gradient to ``.grad``, as autograd does.

        Args:
            gradient: of the rank's part of the parameter; its memory may become that of ``.grad``.
            unsummed_over: the ranks among which this is one part of a sum; empty for a gradient that is summed.
        """

    def take_unsummed(self) -> Tensor | None:
        """Remove from ``.grad`` the part that earlier steps left there, and return it; None where there is none."""


class AddUnsummed(nn.Module):
    """Adds to gradients what earlier steps left in ``.grad``, and takes it from there: the sum is stored in its place.

    Args:
        names: for each gradient the parameter's placeholder, or None for one that is not summed.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        super().__init__()
        self.names = tuple(names)
        self._slots: tuple[GradientSlot | None, ...] = ()

    def bind(self, slots: Mapping[str, GradientSlot]) -> None:
        self._slots = tuple(None if name is None else slots[name] for name in self.names)

    def forward(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = [None if slot is None else slot.take_unsummed() for slot in self._slots]
        return tuple(gradient if part is None else gradient + part for gradient, part in zip(gradients, parts, strict=True))
