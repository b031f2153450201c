"""Attention over two inputs: an encoder-decoder with its masks as keyword inputs, and self-attention with a padding mask."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, classes, real

VOCABULARY = 17
WIDTH = 12
SOURCE_LENGTH = 7
TARGET_LENGTH = 5


class EncoderLayer(nn.Module):
    """Self-attention under a padding mask, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=3, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        return x + self.feed_forward(self.norm(x + attended))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's memory, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(WIDTH, num_heads=3, batch_first=True)
        self.cross_attention = nn.MultiheadAttention(WIDTH, num_heads=3, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, memory: Tensor, causal: Tensor, padding: Tensor) -> Tensor:
        attended, _ = self.self_attention(x, x, x, attn_mask=causal, need_weights=False)
        x = x + attended
        crossed, _ = self.cross_attention(x, memory, memory, key_padding_mask=padding, need_weights=False)
        return x + self.feed_forward(self.norm(x + crossed))


class EncoderDecoder(nn.Module):
    """Two sequences of tokens to logits; the memory and both masks are used by every decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.target_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = EncoderLayer()
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, *, padding: Tensor, causal: Tensor) -> Tensor:
        memory = self.encoder(self.source_embedding(source), padding)
        x = self.target_embedding(target)
        for layer in self.decoder:
            x = layer(x, memory, causal, padding)
        return self.head(x)


class PaddedAttention(nn.Module):
    """Two encoder layers over rows of different lengths, averaged over the real positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        assert padding is not None
        for layer in self.layers:
            x = layer(x, padding)
        real_positions = (~padding).unsqueeze(-1)
        mean = (x * real_positions).sum(dim=1) / real_positions.sum(dim=1)
        return self.head(mean)


def _padding(generator: Generator, batch_size: int) -> Tensor:
    """Return True beyond each row's length, which is at least one."""
    lengths = 1 + classes(generator, SOURCE_LENGTH, batch_size)
    return torch.arange(SOURCE_LENGTH) >= lengths.unsqueeze(1)


def _sequences(generator: Generator, batch_size: int) -> Inputs:
    source = classes(generator, VOCABULARY, batch_size, SOURCE_LENGTH)
    target = classes(generator, VOCABULARY, batch_size, TARGET_LENGTH)
    causal = torch.ones(TARGET_LENGTH, TARGET_LENGTH, dtype=torch.bool).triu(1)
    return (source, target), {"padding": _padding(generator, batch_size), "causal": causal}


def _tokens(generator: Generator, batch_size: int) -> Tensor:
    return classes(generator, VOCABULARY, batch_size, TARGET_LENGTH)


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.transpose(1, 2), target)


def _padded_rows(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, SOURCE_LENGTH, WIDTH),), {"padding": _padding(generator, batch_size)}


def _labels(generator: Generator, batch_size: int) -> Tensor:
    return classes(generator, 4, batch_size)


CASES = (
    Case("encoder_decoder", EncoderDecoder, _sequences, _tokens, _token_loss),
    Case("padded_attention", PaddedAttention, _padded_rows, _labels, nn.functional.cross_entropy),
)
