"""The operator ``channel_statistics``: mean and unbiased variance of each channel, as batch normalisation adds them to running statistics.

It is one operator, so that its statistics are those that the normalisation beside it uses: of the whole batch or, with
``batchnorm="local"``, of a rank's own rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define("partitioner::channel_statistics", "(Tensor input) -> Tensor")

channel_statistics = torch.ops.partitioner.channel_statistics.default
"""Mean and unbiased variance, (2, channels), of ``input``, (rows, channels, ...). It has no gradient."""


def _channel_statistics(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, [dim for dim in range(x.dim()) if dim != 1], correction=1)
    return torch.stack((mean, variance))


def _fake(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]))


torch.library.impl(channel_statistics.name(), "CompositeExplicitAutograd", _channel_statistics)
torch.library.register_fake(channel_statistics.name(), _fake)
