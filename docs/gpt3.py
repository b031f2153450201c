"""The eight shapes of GPT-3 in numbers: parameters and FLOPs a token, from graphs of the models and in closed form.

Brown et al., "Language models are few-shot learners", 2020, table 2.1; with 16 heads for XL and a width of 5120 for 13B, where the printed
numbers (24 heads, 5140) do not divide. Layers are alike, so graphs of one and of two tell those of any depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import graph_cost
from partitioner.tracing.trace import trace

VOCABULARY, LENGTH = 50257, 2048

STATE_BYTES = 16
"""For each parameter: 16-bit weight and gradient, and in 32 bits the weight and two moments (Rajbhandari et al., ZeRO, 2020)."""


@dataclass(frozen=True)
class Shape:
    """One row of the paper's table."""

    name: str
    layers: int
    width: int
    heads: int

    @property
    def parameters(self) -> int:
        """Closed form: projections and their biases, norms, embeddings; the head is the token embedding."""
        return 12 * self.layers * self.width**2 + 13 * self.layers * self.width + (VOCABULARY + LENGTH + 2) * self.width

    @property
    def weight_flops(self) -> int:
        """Closed form of a token, forward and backward: 6 for each weight that multiplies it."""
        return 6 * (12 * self.layers * self.width**2 + VOCABULARY * self.width)

    @property
    def attention_flops(self) -> int:
        """Closed form of a token, forward and backward: scores and sums over the whole length."""
        return 12 * self.layers * LENGTH * self.width


SHAPES = (
    Shape("125M", 12, 768, 12),
    Shape("350M", 24, 1024, 16),
    Shape("760M", 24, 1536, 16),
    Shape("1.3B", 24, 2048, 16),
    Shape("2.7B", 32, 2560, 32),
    Shape("6.7B", 32, 4096, 32),
    Shape("13B", 40, 5120, 40),
    Shape("175B", 96, 12288, 96),
)


@dataclass(frozen=True)
class Counted:
    """Size of a model's graph.

    Attributes:
        parameters: how many.
        flops: of a token, forward and backward.
    """

    parameters: int
    flops: int


class Block(nn.Module):
    """Attention as products and a softmax, and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(width // self.heads), dim=-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return y


class Gpt(nn.Module):
    """Tokens (batch, length) to logits; the head is the token embedding."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, shape.width), nn.Embedding(LENGTH, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.token.weight)


def counted(shape: Shape) -> Counted:
    """Count a model of this shape."""
    one, two = (_counted(shape, layers) for layers in (1, 2))
    values = (first + (shape.layers - 1) * (second - first) for first, second in zip(one, two, strict=True))
    return Counted(*values)


def _counted(shape: Shape, layers: int) -> tuple[int, int]:
    with torch.device("meta"):
        model = Gpt(shape, layers).to(torch.bfloat16)
        tokens = torch.empty(2, LENGTH, dtype=torch.int64)
    cost, one = graph_cost(trace(model, (tokens,), {}, True), differentiate=True), Numbers(1)
    flops = sum(one[work.flops] for node in cost.nodes.values() for work in (node.forward, node.backward_input, node.backward_weight))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, round(flops / LENGTH)
