"""Custom autograd functions, each applied between two layers of a model, and the reductions of parts of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class Swish(Function):
    """Elementwise, with a plain number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.slope * x)
        return gradient * (gate + ctx.slope * x * gate * (1 - gate)), None


class Rounded(Function):
    """A straight-through estimator, whose backward is not that of its forward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient


class Reversed(Function):
    """Gives its input back, and turns the gradient round."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient.neg() * 0.5


class Product(Function):
    """A linear layer without bias; the backward flattens rows, and gives the weight no gradient where none is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight if bias is None else x @ weight + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_weight = x.flatten(0, -2).t() @ gradient.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return gradient @ weight.t(), of_weight, None


class Normed(Function):
    """Root mean square over the features, with a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        inner = gradient * weight
        of_x = scale * inner - x * scale**3 * (inner * x).mean(-1, keepdim=True)
        return of_x, (gradient * x * scale).sum(tuple(range(x.dim() - 1)))


class Averaged(Function):
    """Divides the gradient by the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2 / ctx.rows


class Clipped(Function):
    """Bounds the norm of the whole gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient / gradient.norm().clamp(min=1e-3)


class Halved(Function):
    """Several results, one of which has no gradient, among None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: list[float]) -> tuple[Tensor, None, Tensor]:
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.factors = factors
        return x * factors[0], None, positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        return gradient * ctx.factors[1], None


class Rows(Function):
    """Reshapes to the sizes that it was written for."""

    @staticmethod
    def forward(_: Any, x: Tensor, width: int) -> Tensor:
        return x.reshape(-1, width).tanh().reshape(x.shape)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 0.25, None


class Spread(Function):
    """Subtracts the mean over the rows in backward alone."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient - gradient.mean(0)


def apply(function: type[Function], *args: Any) -> Any:
    """Apply a function; PyTorch gives ``apply`` no types."""
    return function.apply(*args)


def swish(model: Model, x: Tensor) -> Any:
    return apply(Swish, apply(Swish, x, 1.0), 2.0)


def rounded(model: Model, x: Tensor) -> Any:
    return apply(Rounded, x * 4)


def reversed_(model: Model, x: Tensor) -> Any:
    return apply(Reversed, x)


def product(model: Model, x: Tensor) -> Any:
    return apply(Product, x, model.weight, None)


def normed(model: Model, x: Tensor) -> Any:
    return apply(Normed, x, model.scale)


def averaged(model: Model, x: Tensor) -> Any:
    return apply(Averaged, x)


def clipped(model: Model, x: Tensor) -> Any:
    return apply(Clipped, x)


def halved(model: Model, x: Tensor) -> Any:
    half, nothing, positive = apply(Halved, x, [0.5, 3.0])
    assert nothing is None
    return torch.where(positive, half, x * 0.1)


def rows(model: Model, x: Tensor) -> Any:
    return apply(Rows, x, 8)


def spread(model: Model, x: Tensor) -> Any:
    return apply(Spread, x)


class Model(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.weight, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function(self, self.first(x)))
        return y


FUNCTIONS = [swish, rounded, reversed_, product, normed, averaged, clipped, halved, rows, spread]
CUT: dict[Callable[..., Any], tuple[str | None, str | None, str | None]] = {
    swish: (None, None, None),
    rounded: (None, None, None),
    reversed_: (None, None, None),
    product: (None, None, "sum"),
    normed: (None, None, "whole"),
    averaged: ("whole", None, None),
    clipped: ("whole", "whole", "whole"),
    halved: (None, None, None),
    rows: (None, None, "whole"),
    spread: ("whole", None, None),
}
"""Function -> how results of parts are combined where a dimension of x (rows, sequence, features) is cut."""
