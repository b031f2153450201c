"""Kernels that return other strides than their fake results: calls traced after them must still run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition


class StepSizes(nn.Module):
    """A projection, softplus, and channels first, as selective state spaces have it (Gu and Dao, arXiv 2312.00752).

    ``softplus_backward`` lays its result out like the gradient that it is given, which is transposed; its fake result is dense.
    """

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.project(x)).transpose(1, 2)


@pytest.mark.parametrize("mode", ["model", "data", pytest.param("tensor", marks=pytest.mark.slow)])
def test_backward_of_softplus_of_what_is_transposed(mode: str) -> None:
    torch.manual_seed(0)
    model, x = StepSizes().double(), torch.rand(4, 3, 6, dtype=torch.float64)
    weights = torch.rand(4, 5, 3, dtype=torch.float64)
    pm = partition(model, 2, mode, example_inputs=(x,), progress=False)
    (model(x) * weights).sum().backward()
    (pm(x) * weights).sum().backward()
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=0.0)
