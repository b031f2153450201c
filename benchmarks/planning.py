"""Cost of ``mode="auto"``: seconds of a processor, memory, and the gap that the proof leaves, by layers and devices.

    python -m benchmarks.planning                                   # GPT-3's width, 12 to 96 layers on 8 to 1,024 A100s; minutes
    python -m benchmarks.planning --layers 12 --devices 8           # one line, for a quick look
    python -m benchmarks.planning --layers 96 --devices 1024 --simulate    # all the way to the simulation of every rank's program

Each line is a process of its own: a GPT is traced on the meta device, then planned for ``Cluster.preset("a100-80gb")``. Seconds are those
of the processor, so that other work on the machine counts little; memory is the most that the process ever held.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cost_models.hardware.clusters import Cluster
from cost_models.hardware.units import format_seconds
from partitioner import partition
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.describe import words_of
from partitioner.tracing.trace import trace

WIDTH, HEADS, LENGTH, VOCABULARY = 12288, 96, 2048, 50257
A_NODE = 8


class Block(nn.Module):
    """Attention and a perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.projection = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same."""
        y = self.attention_norm(x)
        q, k, v = (layer(y).view(*y.shape[:2], HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


class Gpt(nn.Module):
    """Tokens to logits; the weight of the head is that of the embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) to (batch, length, vocabulary)."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return nn.functional.linear(self.norm(self.blocks(x)), self.token.weight)


@dataclass(frozen=True)
class Planned:
    """One line.

    Attributes:
        tracing, planning: s of the processor.
        gibibytes: the most that the process held.
        gap: of the plan.
        step_time: s, predicted.
        words: the plan, for reading.
    """

    tracing: float
    planning: float
    gibibytes: float
    gap: float
    step_time: float
    words: str


def planned(layers: int, devices: int) -> Planned:
    """Trace and plan; one row of the batch for each device, at least 64."""
    model, tokens, cluster = _given(layers, devices)
    start = time.process_time()
    graph = trace(model, (tokens,), {}, training=True)
    traced = time.process_time()
    plan = plans_auto(graph, cluster, PlanRequest("auto", tuple(f"cuda:{rank}" for rank in range(devices))))[0]
    done = time.process_time()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert plan.gap is not None
    return Planned(traced - start, done - traced, held, plan.gap, plan.step_time, words_of(plan))


def simulated(layers: int, devices: int) -> tuple[float, float]:
    """Return processor seconds to trace, plan and lower, and to simulate the programs of all ranks."""
    model, tokens, cluster = _given(layers, devices)
    start = time.process_time()
    partitioned = partition(model, devices, "auto", example_inputs=(tokens,), cluster=cluster, progress=False)
    lowered = time.process_time()
    partitioned.simulate()
    return lowered - start, time.process_time() - lowered


def _given(layers: int, devices: int) -> tuple[Gpt, torch.Tensor, Cluster]:
    with torch.device("meta"):
        model, tokens = Gpt(layers).half(), torch.zeros(max(devices, 64), LENGTH, dtype=torch.int64)
    return model, tokens, Cluster.preset("a100-80gb", nodes=-(-devices // A_NODE), devices_per_node=min(devices, A_NODE))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What automatic plans cost.")
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 48, 96])
    parser.add_argument("--devices", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--simulate", action="store_true", help="lower and simulate, too: seconds of all of it, in place of the plan")
    given = parser.parse_args(argv)
    whole = f"{'lowered':>9} {'simulated':>10} {'together':>9}"
    planning = f"{'trace':>8} {'plan':>8} {'memory':>9} {'gap':>6} {'step':>9}  plan"
    print(f"{'layers':>6} {'devices':>7} {whole if given.simulate else planning}")
    for devices in given.devices:
        for layers in given.layers:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                line = pool.apply(_to_the_simulation if given.simulate else _to_the_plan, (layers, devices))
                pool.close()  # what the process holds is given back when it ends by itself
                pool.join()
            print(f"{layers:6} {devices:7} {line}", flush=True)


def _to_the_plan(layers: int, devices: int) -> str:
    row = planned(layers, devices)
    numbers = f"{row.tracing:6.1f} s {row.planning:6.1f} s {row.gibibytes:5.2f} GiB {row.gap:6.2f}"
    return f"{numbers} {format_seconds(row.step_time):>9}  {row.words}"


def _to_the_simulation(layers: int, devices: int) -> str:
    lowering, simulating = simulated(layers, devices)
    return f"{lowering:7.1f} s {simulating:8.1f} s {lowering + simulating:7.1f} s"


if __name__ == "__main__":
    main()
