"""Small models for ``torch.compile``, in float64, and the comparison of two of them in training."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partitioner import ConfigError

WIDTH = 4


class Plain(nn.Module):
    """A tied and a frozen parameter; results of several kinds in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 6)
        self.second = nn.Linear(6, WIDTH)
        self.tied = nn.Linear(WIDTH, 6)
        self.tied.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.between(self.first(x).relu())
        return {"y": self.tied(self.second(hidden)), "rows": x.shape[0], "none": None}


class Normalized(nn.Module):
    """Buffers that forward writes, and one that it reads; a number and a float attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.factor = 0.5

    def forward(self, x: Tensor, times: int = 1) -> dict[str, Any]:
        return {"y": self.norm(self.linear(x)) * self.scale * self.factor * times}


class Heads(nn.Module):
    """Attention, which reads the sizes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            batch, length, width = x.shape
            heads = layer(x).view(batch, length, 2, width // 2).transpose(1, 2)
            x = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(batch, length, width)
        return {"y": x}


class Breaking(Plain):
    """Two graph breaks; the part between them has no parameters."""

    def between(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        return x * 3


class Checkpointed(Plain):
    """Activation checkpointing, which Dynamo traces as a graph of its own."""

    def between(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda value: (value * 2).tanh(), x, use_reentrant=False)
        return result


class _Square(torch.autograd.Function):
    """A backward that is not that of the forward: three times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return 6 * gradient * x


class Custom(Plain):
    """A custom autograd function."""

    def between(self, x: Tensor) -> Tensor:
        return _Square.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def twins(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a model, in float64, and an equal one."""
    torch.manual_seed(0)
    model = kind().double()
    return model, copy.deepcopy(model)


def compare_training(
    run: Callable[..., Any], expected: nn.Module, model: nn.Module, shapes: Sequence[tuple[int, ...]], **keywords: Any
) -> None:
    """Train two models side by side, and compare results, gradients, weights and buffers; the loss is of two calls.

    Args:
        run: the compiled form of ``model``, whose parameters the optimizer holds.
        expected: what it must equal.
        shapes: of the inputs of each step.
        keywords: of each call.
    """
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, expected)]
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        first, second = run(x, **keywords), run(2 * x, **keywords)  # both before the backward of either
        expected_first, expected_second = expected(other, **keywords), expected(2 * other, **keywords)
        assert first.keys() == expected_first.keys()
        assert [value for value in first.values() if not isinstance(value, Tensor)] == [
            value for value in expected_first.values() if not isinstance(value, Tensor)
        ]
        torch.testing.assert_close(first["y"], expected_first["y"])
        torch.testing.assert_close(second["y"], expected_second["y"])
        for result in (first, second, expected_first, expected_second):
            result["y"].pow(2).mean().backward()
        torch.testing.assert_close(x.grad, other.grad)
        for parameter, twin in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, twin.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))


def train_in_processes(mode: str) -> None:
    """Compare training in processes, of equal weights on all, with that of one; then start from weights that differ."""
    model, expected = twins(Normalized)
    torch.manual_seed(1)
    options: dict[str, Any] = {"mode": mode}
    compare_training(torch.compile(model, backend="partitioner", options=options), expected, model, [(6, WIDTH), (8, WIDTH)])
    torch._dynamo.reset()
    torch.manual_seed(int(os.environ["RANK"]))
    unlike = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), backend="partitioner", options=options)
    with pytest.raises(ConfigError, match="values of parameters and buffers"):
        unlike(torch.ones(4, WIDTH))
