"""Trace batch normalisation with ``momentum=None``, whose running statistics are averages over all batches, without reading their number.

    n = num_batches_tracked                         y = F.batch_norm(x, None, None, weight, bias, training=True)
    y = F.batch_norm(x, ..., momentum=1 / float(n)) running_mean.copy_(running_mean * (1 - 1 / n) + mean / n)

A trace has no value of a tensor as a number. So the factor stays a tensor, and statistics are results of an operator of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from passes.rules.ops.channel_statistics import channel_statistics

__all__ = ["trace_running_statistics"]

_CLASSES: tuple[Any, ...] = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)  # noqa: SLF001  the class with the forward of all
"""The classes that have a ``forward`` which reads the number of batches."""


@contextlib.contextmanager
def trace_running_statistics() -> Iterator[None]:
    """While active, let batch normalisation with ``momentum=None`` update its running statistics by operations on tensors."""
    originals = [cls.forward for cls in _CLASSES]
    for cls, original in zip(_CLASSES, originals, strict=True):
        cls.forward = _with_averages(original)
    try:
        yield
    finally:
        for cls, original in zip(_CLASSES, originals, strict=True):
            cls.forward = original


def _with_averages(original: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return a ``forward`` that normalises as the original does, without running statistics, and then updates these."""

    @functools.wraps(original)
    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002  of torch
        is_average = self.momentum is None and self.training and self.track_running_stats and self.num_batches_tracked is not None
        if not is_average:
            return original(self, input)
        self.track_running_stats = False
        try:
            result = original(self, input)
        finally:
            self.track_running_stats = True
        _update(self, input)
        return result

    return forward


def _update(module: Any, x: Tensor) -> None:
    """Count the batch, and add its statistics to the averages: ``running * (1 - 1 / n) + new / n``."""
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        statistics = channel_statistics(x.detach().to(module.running_mean.dtype))
        factor = 1.0 / module.num_batches_tracked.to(module.running_mean.dtype)
        for index, running in enumerate((module.running_mean, module.running_var)):
            running.copy_(running * (1.0 - factor) + statistics[index] * factor)
