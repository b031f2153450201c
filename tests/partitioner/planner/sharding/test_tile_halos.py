"""Halo strategies keep the other decisions of a cut."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, partition


class ImageAndText(nn.Module):
    """Convolutions over an image, added to causal attention over a text."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 16, 3, padding=1))
        self.heads = nn.Linear(16, 48)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.heads(text).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = mixed.transpose(1, 2).flatten(2) + self.image(image).mean((2, 3)).unsqueeze(1)
        return result


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_tiles_beside_a_sequence_share_attention_as_asked(attention: str) -> None:
    torch.manual_seed(0)
    model, inputs = ImageAndText(), (torch.randn(2, 3, 16, 16), torch.randn(2, 8, 16))
    constraints = Constraints(attention=attention)
    pm = partition(copy.deepcopy(model), 4, {"tile": 2, "sequence": 2}, example_inputs=inputs, constraints=constraints, progress=False)
    assert pm.plan.attention == attention
    torch.testing.assert_close(pm(*inputs), model(*inputs))
