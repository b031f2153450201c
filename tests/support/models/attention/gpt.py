"""A decoder-only transformer whose first and last weight are one: tied across the whole depth."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, classes

VOCABULARY = 23
LENGTH = 6


class Block(nn.Module):
    """Causal attention with a fused projection, and a feed-forward layer, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        fused = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = fused.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Tokens of shape (batch, length) to logits of shape (batch, length, vocabulary)."""

    def __init__(self, width: int = 12, heads: int = 3, depth: int = 3) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _tokens(generator: Generator, batch_size: int) -> Inputs:
    return (classes(generator, VOCABULARY, batch_size, LENGTH),), {}


def _target(generator: Generator, batch_size: int) -> Tensor:
    return classes(generator, VOCABULARY, batch_size, LENGTH)


CASES = (Case("gpt", Gpt, _tokens, _target, next_token_loss),)

FOUR_TOKENS = Case(
    "gpt_of_four_tokens",
    lambda: Gpt(width=16, heads=4),
    lambda generator, batch_size: ((classes(generator, VOCABULARY, batch_size, 4),), {}),
    lambda generator, batch_size: classes(generator, VOCABULARY, batch_size, 4),
    next_token_loss,
)
"""Not of the zoo: heads and a sequence that two ranks can share in every way."""
