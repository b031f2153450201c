"""Values for sample calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_generator = torch.Generator().manual_seed(0)


class Sample:
    """One call of an overload."""

    def __init__(self, operator: OpOverload, *args: Any, **kwargs: Any) -> None:
        self.operator, self.args, self.kwargs = operator, args, kwargs

    def __repr__(self) -> str:
        shapes = [
            "x".join(map(str, value.shape)) if isinstance(value, Tensor) else "..." if isinstance(value, list) else str(value)
            for value in self.args
        ]
        return f"{str(self.operator).removeprefix('aten.')}({','.join(shapes)})"


def real(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) < 0.5
