"""Note where PyTorch computes something else without gradients: its fast path of transformer encoders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["FAST_PATH_NOTE", "note_fast_paths"]

FAST_PATH_NOTE = (
    "nn.TransformerEncoder in evaluation mode: under torch.no_grad(), PyTorch returns zeros at the positions that src_key_padding_mask "
    "leaves out; the programs return there what the model returns with gradients"
)
"""Difference of a partitioned model."""


def note_fast_paths(model: nn.Module) -> set[str]:
    """Return a set that gets a note once an encoder is called that would take the fast path without gradients.

    The encoders of the model get a ``forward`` of their own, until the attributes of the model are restored.
    """
    found: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not module.training and module.use_nested_tensor:
            vars(module)["forward"] = _noting(module.forward, found)
    return found


def _noting(original: Callable[..., Any], found: set[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(src: Any, mask: Any = None, src_key_padding_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if src_key_padding_mask is not None:
            found.add(FAST_PATH_NOTE)
        return original(src, mask, src_key_padding_mask, *args, **kwargs)

    return forward
