"""Note where PyTorch computes something else without gradients: its fast path of transformer encoders."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["FAST_PATH_NOTE", "record_fast_paths"]

FAST_PATH_NOTE = (
    "nn.TransformerEncoder in evaluation mode: under torch.no_grad(), PyTorch returns zeros at the positions that src_key_padding_mask "
    "leaves out; the programs return there what the model returns with gradients"
)
"""Difference of a partitioned model."""


@contextlib.contextmanager
def record_fast_paths() -> Iterator[set[str]]:
    """Return a set that holds a note once an encoder was called that would take the fast path without gradients."""
    found: set[str] = set()
    original: Any = nn.TransformerEncoder.forward

    @functools.wraps(original)
    def forward(
        self: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if src_key_padding_mask is not None and not self.training and self.use_nested_tensor:
            found.add(FAST_PATH_NOTE)
        return original(self, src, mask, src_key_padding_mask, *args, **kwargs)

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]
    try:
        yield found
    finally:
        nn.TransformerEncoder.forward = original  # type: ignore[method-assign]
