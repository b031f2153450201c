"""Note where PyTorch computes something else without gradients: its fast path of transformer encoders."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from passes.ir.graph import Autocast

FAST_PATH_NOTE = (
    "nn.TransformerEncoder in evaluation mode: under torch.no_grad(), PyTorch returns zeros at the positions that src_key_padding_mask "
    "leaves out; the programs return there what the model returns with gradients"
)
"""Difference of a partitioned model."""

PRECISION_NOTE = (
    "nn.TransformerEncoderLayer in evaluation mode: under torch.no_grad() and autocast on the CPU, PyTorch returns the lower precision; "
    "the programs return what the model returns with gradients"
)
"""Another one: on a GPU, PyTorch does not take the fast path under autocast."""


def note_fast_paths(model: nn.Module, autocast: Autocast | None) -> set[str]:
    """Return a set that gets notes once encoders are called that would take the fast path without gradients.

    The encoders of the model get a ``forward`` of their own, until the attributes of the model are restored.
    """
    found: set[str] = set()
    is_on_cpu = autocast is not None and (autocast.planned_for or autocast.device_type) == "cpu"
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not module.training and module.use_nested_tensor:
            vars(module)["forward"] = _noting(module.forward, found, FAST_PATH_NOTE, "src_key_padding_mask")
        if isinstance(module, nn.TransformerEncoderLayer) and not module.training and module.self_attn.batch_first and is_on_cpu:
            vars(module)["forward"] = _noting(module.forward, found, PRECISION_NOTE)
    return found


def _noting(original: Callable[..., Any], found: set[str], note: str, argument: str | None = None) -> Callable[..., Any]:
    """Return a ``forward`` that adds a note when it is called, with this argument if one is named."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if argument is None or inspect.signature(original).bind(*args, **kwargs).arguments.get(argument) is not None:
            found.add(note)
        return original(*args, **kwargs)

    return forward
