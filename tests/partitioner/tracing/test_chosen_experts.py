"""Loops over the experts that some token chose have no graph: the refusal says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import TraceError, partition

WIDTH, EXPERTS = 6, 4


class Mixture(nn.Module):
    """A router, experts, and a loop over them."""

    def __init__(self, loop: Callable[..., Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        scale, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        return self.loop(self, x, chosen, scale)


def hit(model: Mixture, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """As in Mixtral of transformers 4.57."""
    result = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, row = torch.where(mask[number].squeeze(0))
        result.index_add_(0, row, model.experts[number](x[row]) * scale[row, place, None])
    return result


def compared(model: Mixture, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """As in Mistral's reference."""
    result = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        row, place = torch.where(chosen == number)
        result[row] += scale[row, place, None] * expert(x[row])
    return result


@pytest.mark.parametrize("loop", [hit, compared])
def test_the_refusal_names_the_remedy(loop: Callable[..., Tensor]) -> None:
    with pytest.raises(TraceError) as caught:
        partition(Mixture(loop), 2, "data", example_inputs=(torch.randn(4, WIDTH),), progress=False)
    assert "install transformers 5" in (caught.value.remedy or "")
    assert "grouped_mm" in (caught.value.remedy or "")
