"""A transformer as the benchmarks train it, each layer a layer of a Sequential, so that all contestants cut it alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 512
"""How many tokens there are."""


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 2)
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a perceptron, each added to its input."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.contract(nn.functional.gelu(self.expand(self.norm(x))))
        return result


def gpt(layers: int, width: int) -> nn.Sequential:
    """Embedding, blocks, head."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of every token."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
