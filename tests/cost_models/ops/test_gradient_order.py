"""The order of gradients is that in which autograd calls their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.ops.cost import line_of
from cost_models.ops.gradient_order import gradient_order
from passes.ir.tensor_spec import TensorSpec
from passes.rules.call import Call
from passes.rules.ops.grouped_mm import grouped_mm

aten = torch.ops.aten


def real(*sizes: int) -> Tensor:
    return torch.rand(sizes, dtype=torch.float64).requires_grad_()


GROUPS = torch.tensor([0, 1, 1, 0, 1])
CALLS: dict[str, tuple[OpOverload, tuple[Tensor, ...]]] = {
    "linear": (aten.linear.default, (real(5, 3), real(7, 3))),
    "linear with a bias": (aten.linear.default, (real(5, 3), real(7, 3), real(7))),
    "linear of rows in batches": (aten.linear.default, (real(2, 5, 3), real(7, 3))),
    "addmm": (aten.addmm.default, (real(7), real(5, 3), real(3, 7))),
    "mm": (aten.mm.default, (real(5, 3), real(3, 7))),
    "bmm": (aten.bmm.default, (real(2, 5, 3), real(2, 3, 7))),
    "baddbmm": (aten.baddbmm.default, (real(2, 5, 7).detach(), real(2, 5, 3), real(2, 3, 7))),
    "matmul": (aten.matmul.default, (real(2, 5, 3), real(2, 3, 7))),
    "mul": (aten.mul.Tensor, (real(5, 3), real(5, 3))),
    "div": (aten.div.Tensor, (real(5, 3), real(5, 3))),
    "grouped_mm": (grouped_mm, (real(5, 3), real(2, 3, 4), GROUPS)),
}


class Results(TorchDispatchMode):
    """Keeps the results of kernels, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if isinstance(result, Tensor) and not function.is_view:
            self.kept.append(result)
        return result


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same elements, in whatever layout."""
    return one.numel() == other.numel() and torch.allclose(one.flatten().sort().values, other.flatten().sort().values)


@pytest.mark.parametrize("name", CALLS)
def test_the_order_is_that_of_autograd(name: str) -> None:
    operator, arguments = CALLS[name]
    given = {each.name: value for each, value in zip(operator._schema.arguments, arguments, strict=False)}
    trained = {each: value for each, value in given.items() if value.requires_grad}
    result = operator(*arguments)
    with Results() as results:
        gradients = torch.autograd.grad(result, list(trained.values()), torch.rand_like(result))
    by_kernel = {each: [is_same(kept, found) for kept in results.kept] for each, found in zip(trained, gradients, strict=True)}
    described = [(each, TensorSpec(tuple(value.shape), value.dtype)) for each, value in given.items()]
    line = line_of(operator)
    assert line is not None
    order = gradient_order(Call.numbered(operator, described, ()), line.family, trained)
    assert list(order) == sorted(trained, key=lambda each: by_kernel[each].index(True))


def test_one_kernel_computes_all_gradients_of_a_convolution() -> None:
    assert gradient_order(Call.numbered(aten.convolution.default, [], ()), "convolution", ("input", "weight")) == ()
