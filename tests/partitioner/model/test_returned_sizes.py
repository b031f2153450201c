"""Sizes among the results of a model are those of the whole batch, on every rank, however its rows are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        return self.last(self.first(x).relu()), x.shape[0], 2 * x.shape[0] + 1


@pytest.mark.filterwarnings("ignore:a batch of 7 rows does not divide")
@pytest.mark.parametrize(
    ("devices", "mode"),
    [
        pytest.param(2, "pipeline", marks=pytest.mark.slow),
        pytest.param(2, "data", marks=pytest.mark.slow),
        pytest.param(2, "tensor", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
        (4, {"data": 2, "pipeline": 2}),
    ],
    ids=str,
)
def test_a_returned_size_counts_the_whole_batch(devices: int, mode: Any) -> None:
    torch.manual_seed(0)
    model = Counting().double()
    pm = partition(model, devices, mode, example_inputs=(torch.randn(8, 8, dtype=torch.float64),))
    for rows in (4, 7, 8):
        x = torch.randn(rows, 8, dtype=torch.float64)
        model.zero_grad()
        pm.zero_grad()
        expected, found = model(x), pm(x)
        assert found[1:] == expected[1:] == (rows, 2 * rows + 1)
        torch.testing.assert_close(found[0], expected[0])
        expected[0].square().mean().backward()
        found[0].square().mean().backward()
        torch.testing.assert_close(pm.full_gradients(), {name: each.grad for name, each in model.named_parameters()})
