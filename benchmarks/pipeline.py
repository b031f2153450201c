"""Our pipeline beside ``torch.distributed.pipelining``: same model, cut, schedule and process group, steps interleaved.

    python benchmarks/pipeline.py            # starts two processes with one thread each, gloo

Three tables:

1. at size: a GPT of 8 layers; step time of ours over torch's 1F1B;
2. tiny: the CPU time that a microbatch costs beyond its compute, summed over both processes. The compute is the two halves of the
   model run eagerly, forward and backward, with nothing between them;
3. unlike layers: our cut against the cut that gives every stage as many layers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from partitioner import Constraints, PartitionedModel, partition

N_MICROBATCHES = 8
VOCABULARY = 512


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
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.contract(nn.functional.gelu(self.expand(self.norm(x))))
        return result


class Narrow(nn.Module):
    """A block between two projections: far cheaper than its neighbours."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.body(x)
        return result


def gpt(layers: int, width: int) -> nn.Sequential:
    """Embedding, blocks, head: each a layer of a Sequential, so that both sides cut it alike."""
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


def unlike(width: int) -> nn.Sequential:
    """Eight layers of which the costly ones come first."""
    layers = [Block(width) if index < 4 else Narrow(width, width // 8) for index in range(8)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """One model with its batch.

    Attributes:
        cut: the layer that begins the second stage.
    """

    model: nn.Sequential
    tokens: Tensor
    cut: int


def case(layers: int, width: int, rows: int, length: int) -> Case:
    torch.manual_seed(0)
    model = gpt(layers, width)
    return Case(model, torch.randint(0, VOCABULARY, (rows, length)), 1 + layers // 2)


# -- the contestants ---------------------------------------------------------------------------------------------------------------


def ours(of: Case, schedule: str, cut: int | None) -> tuple[PartitionedModel, Callable[[], Tensor]]:
    """Our pipeline; ``cut`` None lets the planner cut."""
    constraints = None if cut is None else Constraints(split_spec={str(cut): "beginning"})
    pm = partition(
        of.model,
        devices=["cpu"] * dist.get_world_size(),
        mode="pipeline",
        example_inputs=(of.tokens,),
        schedule=schedule,
        n_microbatches=N_MICROBATCHES,
        recompute="none",
        constraints=constraints,
        progress=False,
    )

    def step() -> Tensor:
        pm.zero_grad()
        return pm.train_step(of.tokens, target=of.tokens, loss_fn=loss_of)

    return pm, step


def torchs(of: Case, schedule: str) -> Callable[[], None]:
    """``torch.distributed.pipelining`` on the same cut."""
    rank = dist.get_rank()
    half = of.model[: of.cut] if rank == 0 else of.model[of.cut :]
    stage = PipelineStage(half, rank, dist.get_world_size(), torch.device("cpu"))
    kind = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[schedule]
    pipeline = kind(stage, n_microbatches=N_MICROBATCHES, loss_fn=loss_of)

    def step() -> None:
        half.zero_grad()
        if rank == 0:
            pipeline.step(of.tokens)
        else:
            pipeline.step(target=of.tokens)

    return step


def compute_alone(of: Case) -> Callable[[], None]:
    """This process's half of the model, forward and backward on every microbatch, no communication."""
    first, second = of.model[: of.cut], of.model[of.cut :]
    parts = of.tokens.chunk(N_MICROBATCHES)
    with torch.no_grad():
        received = [first(part) for part in parts]
    upstream = [torch.ones_like(value) for value in received]

    def step() -> None:
        of.model.zero_grad()
        for part, value, gradient in zip(parts, received, upstream, strict=True):
            if dist.get_rank() == 0:
                first(part).backward(gradient)
            else:
                loss = loss_of(second(value.detach().requires_grad_()), part) / N_MICROBATCHES
                loss.backward()

    return step


# -- measuring ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Medians over rounds.

    Attributes:
        wall: seconds a step, of the slower process.
        processor: CPU seconds a step, summed over the processes.
    """

    wall: float
    processor: float


def measure(steps: Mapping[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, Measured]:
    """Run the contestants in turn, round after round, and take medians."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            start, start_processor = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                step()
            spent = torch.tensor([time.perf_counter() - start, time.process_time() - start_processor]) / repeats
            slowest, total = spent.clone(), spent.clone()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            if number > 0:  # the first round warms up
                wall[name].append(slowest[0].item())
                processor[name].append(total[1].item())
    return {name: Measured(statistics.median(wall[name]), statistics.median(processor[name])) for name in steps}


def at_size(rounds: int) -> None:
    of = case(layers=8, width=256, rows=16, length=128)
    rows = []
    for schedule in ("1F1B", "GPipe"):
        found = measure({"ours": ours(of, schedule, of.cut)[1], "torch": torchs(of, schedule)}, rounds, repeats=1)
        rows.append(
            (schedule, f"{found['ours'].wall * 1e3:.1f}", f"{found['torch'].wall * 1e3:.1f}", _ratio(found["ours"], found["torch"]))
        )
    table("GPT, 8 layers, width 256, batch 16 x 128, 8 microbatches", ("schedule", "ours ms", "torch ms", "ours / torch"), rows)


def tiny(rounds: int) -> None:
    of = case(layers=4, width=32, rows=16, length=8)
    rows = []
    for schedule in ("1F1B", "GPipe"):
        steps = {"ours": ours(of, schedule, of.cut)[1], "torch": torchs(of, schedule), "compute": compute_alone(of)}
        found = measure(steps, rounds, repeats=10)
        added = {name: (found[name].processor - found["compute"].processor) / N_MICROBATCHES * 1e3 for name in ("ours", "torch")}
        rows.append(
            (schedule, f"{added['ours']:+.2f}", f"{added['torch']:+.2f}", f"{found['compute'].processor / N_MICROBATCHES * 1e3:.2f}",
             _ratio(found["ours"], found["torch"]))
        )  # fmt: skip
    head = ("schedule", "ours ms", "torch ms", "compute ms", "step ours / torch")
    table("GPT, 4 layers, width 32, batch 16 x 8: CPU time added per microbatch, both processes", head, rows)


def unlike_layers(rounds: int) -> None:
    torch.manual_seed(0)
    model = unlike(256)
    of = Case(model, torch.randint(0, VOCABULARY, (16, 128)), 5)
    planned, step = ours(of, "1F1B", None)
    found = measure({"planned": step, "equal": ours(of, "1F1B", of.cut)[1]}, rounds, repeats=1)
    first = planned.plan.stages[1].modules[0] if planned.plan.stages[1].modules else planned.plan.stages[1].first_node
    rows = [
        ("planned", f"layer {first}", f"{found['planned'].wall * 1e3:.1f}"),
        ("equal layer count", f"layer {of.cut}", f"{found['equal'].wall * 1e3:.1f}"),
    ]
    table("Eight unlike layers, the costly ones first", ("cut", "second stage from", "ms"), rows)
    say(f"the equal cut takes {_ratio(found['equal'], found['planned'])} of the planned one\n")


def _ratio(one: Measured, other: Measured) -> str:
    return f"{one.wall / other.wall:.2f}x"


# -- printing ----------------------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    say(title)
    for row in [head, *rows]:
        say("  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]))
    say("")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=7, help="rounds of which medians are taken (default 7)")
    rounds = arguments.parse_args(argv).rounds
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(Path(__file__).resolve())]
        raise SystemExit(subprocess.run([*command, "--rounds", str(rounds)], check=False).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    say(f"torch {torch.__version__}, 2 processes, 1 thread each, gloo; medians of {rounds} interleaved rounds\n")
    at_size(rounds)
    tiny(rounds)
    unlike_layers(rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
