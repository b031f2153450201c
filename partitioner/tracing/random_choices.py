"""Decide comparisons with random numbers that can only come out one way.

Encoders of transformers drop layers in training: ``if torch.rand([]) < self.layerdrop``. A trace cannot follow a value, but with
``layerdrop = 0.0`` there is nothing to follow. The number is drawn all the same, so that random numbers behind it stay what they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["DecidedRandomChoices"]

_COMPARISONS: Mapping[Any, Callable[[Any, Any], bool]] = {
    Tensor.lt: operator.lt,
    Tensor.__lt__: operator.lt,
    torch.lt: operator.lt,
    Tensor.le: operator.le,
    Tensor.__le__: operator.le,
    torch.le: operator.le,
    Tensor.gt: operator.gt,
    Tensor.__gt__: operator.gt,
    torch.gt: operator.gt,
    Tensor.ge: operator.ge,
    Tensor.__ge__: operator.ge,
    torch.ge: operator.ge,
}

_LEAST, _LARGEST = 0.0, 1.0 - 2.0**-24
"""What ``torch.rand`` draws lies in [0, 1)."""


class DecidedRandomChoices(TorchFunctionMode):
    """While active, comparing one uniform random number with a constant gives a bool where every number gives the same."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        decided = self._decide(func, args)
        if decided is not None:
            return decided
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.ndim == 0:
            self._drawn.append(result)
        return result

    def _decide(self, func: Any, args: Any) -> bool | None:
        compare = _COMPARISONS.get(func) if len(args) == 2 else None
        if compare is None or not isinstance(args[1], int | float) or not any(args[0] is drawn for drawn in self._drawn):
            return None
        answers = {compare(_LEAST, args[1]), compare(_LARGEST, args[1])}
        return answers.pop() if len(answers) == 1 else None
