"""A loss function that is not in the graph: memory as ``cross_entropy`` holds it."""

from __future__ import annotations

import torch

_COPIES = 3
"""Logarithms of probabilities, their gradient, and that of the results, all alive at once."""


def copies_in_loss(dtype: torch.dtype) -> int:
    """Return how many copies of a model's results a loss function holds besides these and their gradient, in units of their bytes.

    Losses of results narrower than float32 are computed in float32, as autocast does.
    """
    return _COPIES * max(torch.float32.itemsize // dtype.itemsize, 1) - 1
