"""Let models that ask for float32 inside compute in float64: parts that are added in another order then differ by its rounding alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def compute_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 what a model converts from float64 to float32, until the test ends."""
    to = Tensor.to

    def stays(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return values if values.dtype is torch.float64 and args == (torch.float32,) else to(values, *args, **kwargs)

    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(Tensor, "to", stays)
