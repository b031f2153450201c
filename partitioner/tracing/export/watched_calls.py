"""Watch the calls of a model that torch dispatches to modes of functions, which needs no replacement of a function of torch.

- Random numbers: encoders of transformers drop layers in training, ``if torch.rand([]) < self.layerdrop``. A trace cannot branch on a
  value, but with ``layerdrop = 0.0`` the result is constant. The number is still drawn, so that later draws do not change.
- Uses of autograd are recorded or refused (``partitioner.tracing.autograd.hooks``).
- Batch normalisation with ``momentum=None`` counts batches by a tensor (``partitioner.tracing.export.cumulative_averages``).
- FlexAttention is decomposed (``partitioner.tracing.export.flex_attention``).
- ``torch.no_grad`` inside of autocast is traced as if it were around it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partitioner.tracing.autograd.hooks import observe_autograd_use
from partitioner.tracing.export.cumulative_averages import CumulativeAverages
from partitioner.tracing.export.flex_attention import attention, is_flex_attention
from passes.ir.torch_private import outside_of_autocast, set_grad_mode

_RANDOM_COMPARISONS: Mapping[Any, Callable[[Any, Any], bool]] = {
    function: compare
    for compare in (operator.lt, operator.le, operator.gt, operator.ge)
    for function in (getattr(torch, compare.__name__), getattr(Tensor, compare.__name__), getattr(Tensor, f"__{compare.__name__}__"))
}

_LEAST, _LARGEST = 0.0, 1.0 - 2.0**-24
"""The least and the largest number that ``torch.rand`` draws."""


class WatchedCalls(TorchFunctionMode):
    """While active, watch the calls of a model.

    Comparing a scalar of ``torch.rand`` with a number gives a bool if all draws give the same one.

    Args:
        questions: gets what code of the model asks of the state of autograd.
        averages: the layers of the model whose statistics are averages over all batches.
    """

    def __init__(self, questions: set[str], averages: CumulativeAverages) -> None:
        super().__init__()
        self._drawn: list[Tensor] = []
        self._questions, self._averages = questions, averages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the body of a loop or branch
            return func(*args, **(kwargs or {}))
        observe_autograd_use(func, self._questions)
        if func is set_grad_mode:
            with outside_of_autocast():
                return func(*args, **(kwargs or {}))
        known = self._constant_result(func, args) if func in _RANDOM_COMPARISONS else self._averages.result(func, args, kwargs or {})
        if known is not None:
            return known
        result: Any = (attention if is_flex_attention(func) else func)(*args, **(kwargs or {}))
        if func is torch.rand and result.ndim == 0:
            self._drawn.append(result)
        return result

    def _constant_result(self, func: Any, args: Any) -> bool | None:
        """Return the result of a comparison that is the same for all draws; None for any other call."""
        compare = _RANDOM_COMPARISONS.get(func) if len(args) == 2 else None
        if compare is None or not isinstance(args[1], int | float) or not any(args[0] is drawn for drawn in self._drawn):
            return None
        answers = {compare(_LEAST, args[1]), compare(_LARGEST, args[1])}
        return answers.pop() if len(answers) == 1 else None
