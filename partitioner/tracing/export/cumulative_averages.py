"""Trace batch normalisation with ``momentum=None``, whose running statistics are averages over all batches, without reading their number.

    n = num_batches_tracked                         y = F.batch_norm(x, None, None, weight, bias, training=True)
    y = F.batch_norm(x, ..., momentum=1 / float(n)) running_mean.copy_(running_mean * (1 - 1 / n) + mean / n)

A trace has no value of a tensor as a number. So the factor stays a tensor, and statistics are results of an operator of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.rules.ops.channel_statistics import channel_statistics

_CLASSES: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class CumulativeAverages:
    """The layers of a model whose statistics are averages over all batches, as a mode of functions sees their calls.

    Args:
        model: the model, which holds the tensors of the trace when it is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [each for each in model.modules() if isinstance(each, _CLASSES) and each.momentum is None]

    def result(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that reads the number of batches, or normalises with it; None for any other call."""
        if function in (Tensor.__float__, Tensor.item):
            return 1.0 if any(layer.num_batches_tracked is args[0] for layer in self._layers) else None
        if function is not F.batch_norm or not kwargs["training"] or args[1] is None:
            return None
        layer = next((layer for layer in self._layers if layer.running_mean is args[1]), None)
        return None if layer is None else _normalized(layer.num_batches_tracked, *args, **kwargs)


def _normalized(count: Tensor, x: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any) -> Tensor:
    """Normalise without running statistics, and update these: ``running * (1 - 1 / n) + new / n``."""
    result = F.batch_norm(x, None, None, **kwargs)
    with torch.no_grad():
        statistics, factor = channel_statistics(x.detach().to(mean.dtype)), 1.0 / count.to(mean.dtype)
        for index, running in enumerate((mean, variance)):
            running.copy_(running * (1.0 - factor) + statistics[index] * factor)
    return result
