"""Memory and bytes of the ways to share attention over a sequence, gather, Ulysses, ring and zigzag, counted from the programs.

    python -m benchmarks.long_context                                        # 4 ranks, sequences of 512 to 4096
    python -m benchmarks.long_context --lengths 4096 --ranks 2 4 --kv-heads 2

memory       the most that a rank has at once beyond parameters, gradients and optimizer state, in a training step of two layers
sent         bytes that leave a rank for attention in a step, forward and backward
paper        the same by the papers' formulas, of B bytes of queries and K of keys (as many of values) over n ranks:
             gather 4 K (n - 1) / n, Ulysses (4 B + 4 K) (n - 1) / n^2, ring 6 K (n - 1) / n; zigzag, of
             which there is no paper's, (4 B + 4 K) / n more for the order of the sequence, less what is in place: of 2n pieces one, or two
             if 3 does not divide n
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner import Constraints, PartitionedModel, partition
from passes.ir.comm.index_ranges import largest_message, segments
from passes.ir.comm.primitives import all_gather, all_to_all, halo_add, halo_exchange, reduce_scatter
from passes.ir.plan import ATTENTION
from passes.ir.schedule import Action

WIDTH, HEADS, LAYERS, ROWS = 256, 8, 2, 1
ELEMENT = 4
"""Bytes of a number in float32."""


class Layer(nn.Module):
    """Causal attention with grouped heads, and a feed-forward layer, both residual."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads, size = kv_heads, WIDTH // HEADS
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, kv_heads * size), nn.Linear(WIDTH, kv_heads * size)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        projected = ((self.query, HEADS), (self.key, self.kv_heads), (self.value, self.kv_heads))
        q, k, v = (linear(x).unflatten(2, (heads, WIDTH // HEADS)).transpose(1, 2) for linear, heads in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != HEADS)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Summed(nn.Module):
    """Layers, and a loss that each rank computes of its part of the sequence."""

    def __init__(self, kv_heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(kv_heads) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).square().sum()
        return result


def _exchanged(node: fx.Node) -> float:
    """Return the bytes that leave a mean rank in an exchange of positions of the sequence, from what each rank reads of others."""
    of_tensors: Any = node.kwargs
    (owned,), (wanted,) = of_tensors["owned"], of_tensors["wanted"]
    copies = segments(owned, wanted)
    pairs = itertools.permutations(range(len(owned)), 2)
    of_others = [copy.count for reader, owner in pairs for copy in copies[reader][owner]]
    return float(node.meta["bytes"]) / largest_message(owned, wanted) * sum(of_others) / len(owned)


@dataclass(frozen=True)
class Subject:
    """The benchmark's model over its sequence, with one way to share attention.

    Attributes:
        attention: one of ``ATTENTION``.
        ranks, length: number of ranks, and of positions.
        kv_heads: heads of keys and values.
        layers: number of layers.
    """

    attention: str
    ranks: int
    length: int
    kv_heads: int = HEADS
    layers: int = LAYERS

    @cached_property
    def partitioned(self) -> PartitionedModel:
        """The partitioned model."""
        torch.manual_seed(0)
        x, constraints = torch.rand(ROWS, self.length, WIDTH), Constraints(attention=self.attention)
        model = Summed(self.kv_heads, self.layers)
        return partition(model, self.ranks, "sequence", example_inputs=(x,), constraints=constraints, recompute="none", progress=False)

    @property
    def sent(self) -> float:
        """Bytes that leave a rank for attention in a step, of a mean rank: all collectives of forward and backward are of attention."""
        others = self.ranks - 1
        leaving = {all_gather: others, reduce_scatter: others / self.ranks, all_to_all: others / self.ranks}
        nodes = [node for node in self.partitioned.graph(0).graph.nodes if isinstance(node.meta.get("section"), Action)]
        exchanged = sum(_exchanged(node) for node in nodes if node.target in (halo_exchange, halo_add))
        return float(exchanged + sum(leaving[node.target] * node.meta["bytes"] for node in nodes if node.target in leaving))

    @property
    def paper(self) -> float:
        """The same by the formula."""
        of_queries = ROWS * self.length * WIDTH * ELEMENT
        of_keys = of_queries * self.kv_heads / HEADS
        all_operands, others = 4 * of_queries + 4 * of_keys, (self.ranks - 1) / self.ranks
        in_place = (1 if self.ranks % 3 == 0 else 2) / (2 * self.ranks)
        ring = 6 * of_keys * others
        formulas = {
            "gather": 4 * of_keys * others,
            "ulysses": all_operands * others / self.ranks,
            "ring": ring,
            "zigzag": ring + all_operands * (1 - in_place) / self.ranks,
        }
        return self.layers * formulas[self.attention]

    @property
    def memory(self) -> int:
        """Peak bytes of a rank in a simulated step, without parameters, gradients, optimizer state and the input, which callers keep."""
        of_input = ROWS * self.length * WIDTH * ELEMENT
        return max(memory.highest["activations"][0] for memory in self.partitioned.simulate().memory) - of_input


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of ranks, length and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4], metavar="N", help="default: 4")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096], metavar="S", help="default: 512 1024 2048 4096")
    parser.add_argument("--kv-heads", type=int, default=HEADS, metavar="H", help=f"heads of keys and values, of {HEADS} of queries")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print(f"{'ranks':>5} {'sequence':>8}  {'attention':9}  {'memory, MiB':>11}  {'sent, MiB':>9}  {'paper, MiB':>10}")
    for ranks in options.ranks:
        for length in options.lengths:
            for attention in ATTENTION:
                subject = Subject(attention, ranks, length, options.kv_heads)
                mib = [f"{size / 2**20:.2f}" for size in (subject.memory, subject.sent, subject.paper)]
                print(f"{ranks:5} {length:8}  {attention:9}  {mib[0]:>11}  {mib[1]:>9}  {mib[2]:>10}", flush=True)


if __name__ == "__main__":
    main()
