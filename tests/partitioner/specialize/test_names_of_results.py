"""Results have names of their own in each rank's graph: parts of unequal sizes need calls of other numbers, and of other names."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition


class Products(nn.Module):
    """Three heads, of which two ranks have two and one; products are named as the sizes of parts are.

    Args:
        order: of the results, of 0 and 1.
    """

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.attention, self.last, self.order = nn.MultiheadAttention(6, 3, batch_first=True), nn.Linear(6, 4), order

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.attention(x, x, x, need_weights=False)[0]
        hidden = self.last(y)
        products = x * y, hidden * hidden
        return tuple(products[place] for place in self.order)


def loss_of(results: tuple[Tensor, ...], _: Any = None) -> Tensor:
    losses = [(place + 1) * result.square().mean() for place, result in enumerate(results)]
    return torch.stack(losses).sum()


MESHES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "tensor": (2, "tensor", {}),
    "pipeline": (4, {"tensor": 2, "pipeline": 2}, {"schedule": "ZBV", "n_microbatches": 1, "recompute": "full"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1,)])
@pytest.mark.parametrize("mesh", ["tensor", "pipeline"])
def test_ranks_of_unequal_parts_take_the_gradients_of_their_results(mesh: str, order: tuple[int, ...]) -> None:
    devices, mode, options = MESHES[mesh]
    torch.manual_seed(0)
    model = Products(order).double()
    x = torch.randn(6, 6, 6, dtype=torch.float64)
    pm = partition(model, devices, mode, example_inputs=(x,), **options)
    for chosen in (slice(None), slice(-1, None)):
        model.zero_grad()
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss = loss_of(model(theirs)[chosen])
        loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        pm.zero_grad()
        loss_of(pm(mine)[chosen]).backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
        _assert_equal(dict(pm.full_gradients()), expected)
        pm.zero_grad()
        step = pm.train_step(x, target=torch.zeros(6), loss_fn=lambda results, _, chosen=chosen: loss_of(results[chosen]))
        torch.testing.assert_close(step, loss.detach())
        _assert_equal(dict(pm.full_gradients()), expected)


def _assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient)
