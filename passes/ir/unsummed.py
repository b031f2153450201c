"""Gradients that are not summed yet: ranks that compute on rows of their own keep their parts until a later step sums them.

    step in no_sync      .grad = own part                                        nothing is sent
    step in no_sync      .grad = own part + own part                             nothing is sent
    step outside         .grad = sum over ranks of (.grad + own part)            one sum

A gradient that was summed before the first of them is divided among the ranks, so that the later sum gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

__all__ = ["AddUnsummed", "is_unsummed", "keep_unsummed", "mark_summed"]


def is_unsummed(parameter: Tensor) -> bool:
    """Whether ``.grad`` is a rank's own part. One that was cleared or replaced since is none."""
    return parameter.grad is not None and getattr(parameter, "_unsummed_gradient", None) is parameter.grad


def keep_unsummed(parameter: Tensor, gradient: Tensor, n_ranks: int) -> None:
    """Add a part to ``.grad`` that is to be summed over so many ranks later."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        if not is_unsummed(parameter):
            parameter.grad.div_(n_ranks)
        parameter.grad.add_(gradient)
    parameter._unsummed_gradient = parameter.grad  # type: ignore[attr-defined]  # noqa: SLF001  # it lives and dies with the parameter


def mark_summed(parameter: Tensor) -> None:
    """What ``.grad`` holds is summed."""
    if hasattr(parameter, "_unsummed_gradient"):
        del parameter._unsummed_gradient  # noqa: SLF001


class AddUnsummed(nn.Module):
    """Adds to gradients what earlier steps left in ``.grad``, and takes it from there: the sum is stored in its place.

    Args:
        names: for each gradient the parameter's placeholder, or None for one that is not summed.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        super().__init__()
        self.names = tuple(names)
        self._parameters_of: tuple[Tensor | None, ...] = ()

    def bind(self, state: Mapping[str, Tensor]) -> None:
        self._parameters_of = tuple(None if name is None else state[name] for name in self.names)

    def forward(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = []
        for parameter, gradient in zip(self._parameters_of, gradients, strict=True):
            if parameter is None or parameter.grad is None or not is_unsummed(parameter):
                found.append(gradient)
                continue
            found.append(gradient + parameter.grad)
            parameter.grad = None
            mark_summed(parameter)
        return tuple(found)
