"""Operations that a user registered with ``torch.library``: their backward is kept, and they are computed whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, partition
from tests.support.running.slow_values import slow


@torch.library.custom_op("tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor, *, name: float) -> Tensor:
    return x @ weight * name


@product.register_fake
def _(x: Tensor, weight: Tensor, *, name: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.factor = keyword_only_inputs["name"]


def gradients(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return given @ weight.t() * ctx.factor, x.t() @ given * ctx.factor


product.register_autograd(gradients, setup_context=keep)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(product(self.first(x), self.weight, name=2.0)))
        return y


@pytest.mark.parametrize("mode", [*slow("model", "data"), "fsdp", "tensor", "pipeline"])
def test_a_registered_backward_is_that_of_the_model(mode: str) -> None:
    """One keyword is called as an argument of those that write programs."""
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(4, 6, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), n_microbatches=1 if mode == "pipeline" else None)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    wanted, found = model(inputs[0]), pm(inputs[1])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    wanted.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-9, atol=1e-9)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


def test_microbatches_are_refused_with_the_operation_that_hides_the_rows() -> None:
    with pytest.raises(ConfigError, match=r"tests\.product"):
        partition(Model(), 2, "pipeline", example_inputs=(torch.randn(4, 6),), n_microbatches=2)
