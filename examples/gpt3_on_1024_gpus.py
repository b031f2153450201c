"""Plan GPT-3 with 175 billion parameters on 1,024 A100s: nothing is allocated and nothing runs, so that a laptop can do it.

    python examples/gpt3_on_1024_gpus.py
    python examples/gpt3_on_1024_gpus.py --layers 12 --devices 64 --batch-size 64

The model lives on the meta device. Its 96 equal blocks are planned as one, repeated. The gap says what the proof leaves open: how much less
time any other plan of those that were to choose from could take, by the same prices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster
from cost_models.hardware.units import format_bytes, format_seconds
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.describe import words_of
from partitioner.reports.explain.choices import contenders_section
from partitioner.tracing.trace import trace

WIDTH, HEADS, LENGTH, VOCABULARY = 12288, 96, 2048, 50257


class Block(nn.Module):
    """Attention and a perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same."""
        fused = self.query_key_value(self.attention_norm(x)).unflatten(2, (3, HEADS, -1))
        query, key, value = fused.permute(2, 0, 3, 1, 4).unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


class Gpt(nn.Module):
    """Tokens to logits; the weight of the head is that of the embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(layers))), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, vocabulary)."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return nn.functional.linear(self.norm(self.blocks(x)), self.token.weight)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=1536)
    options = parser.parse_args(argv)

    with torch.device("meta"):
        model, tokens = Gpt(options.layers).half(), torch.zeros(options.batch_size, LENGTH, dtype=torch.int64)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cluster = Cluster.preset("a100-80gb", nodes=-(-options.devices // 8), devices_per_node=min(options.devices, 8))
    started = time.process_time()
    graph = trace(model, (tokens,), {}, training=True)
    traced = time.process_time()
    request = PlanRequest("auto", tuple(f"cuda:{rank}" for rank in range(options.devices)))
    plan = PlanProblem(graph, cluster, request, None, None).solve()
    planned = time.process_time()

    print(f"{parameters / 1e9:.1f} billion parameters, {options.devices} A100s, {options.batch_size} sequences of {LENGTH} tokens a step\n")
    print(f"plan    {words_of(plan)}")
    print(f"axes    {', '.join(f'{axis} over {dimension}' for axis, dimension in plan.axes)}")
    print(f"step    {format_seconds(plan.step_time)} predicted; {options.batch_size * LENGTH / plan.step_time:,.0f} tokens a second")
    print(f"memory  {format_bytes(max(plan.memory))} of {format_bytes(cluster.devices[0].memory_bytes)} on the fullest device")
    print(f"gap     {plan.gap:.1%}: {plan.prediction.searched}")
    print(f"took    {traced - started:.1f} s to trace, {planned - traced:.1f} s to plan, of one processor\n")
    beside = contenders_section(plan)
    print("\n".join(beside.lines() if beside is not None else ["there was no other plan"]))


if __name__ == "__main__":
    main()
