"""Our pipeline beside ``torch.distributed.pipelining``: same model, cut, schedule and process group, steps interleaved.

    python -m benchmarks.pipeline            # starts two processes with one thread each, gloo

Three tables:

1. at size: a GPT of 8 layers; step time of ours over torch's 1F1B;
2. tiny: the CPU time that a microbatch costs beyond its compute, summed over both processes. The compute is the two halves of the
   model run eagerly, forward and backward, with nothing between them;
3. different layers: our cut against the cut that gives every stage as many layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.rounds import measure, ratio, run_tables, say, table
from benchmarks.transformer import VOCABULARY, Block, gpt, loss_of
from partitioner import Constraints, PartitionedModel, partition

N_MICROBATCHES = 8


class Narrow(nn.Module):
    """A block between two projections: far cheaper than its neighbours."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.body(x)
        return result


def unlike(width: int) -> nn.Sequential:
    """Eight layers of which the costly ones come first."""
    layers = [Block(width) if index < 4 else Narrow(width, width // 8) for index in range(8)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


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
    """Return a step of ``torch.distributed.pipelining`` on the same cut."""
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
    """Return a step of this process's half of the model, forward and backward on every microbatch, without communication."""
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


# -- the tables --------------------------------------------------------------------------------------------------------------------


def at_size(rounds: int) -> None:
    of = case(layers=8, width=256, rows=16, length=128)
    rows = []
    for schedule in ("1F1B", "GPipe"):
        found = measure({"ours": ours(of, schedule, of.cut)[1], "torch": torchs(of, schedule)}, rounds, repeats=1)
        rows.append((schedule, f"{found['ours'].wall * 1e3:.1f}", f"{found['torch'].wall * 1e3:.1f}", ratio(found["ours"], found["torch"])))
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
             ratio(found["ours"], found["torch"]))
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
    table("Eight different layers, the costly ones first", ("cut", "second stage from", "ms"), rows)
    say(f"the equal cut takes {ratio(found['equal'], found['planned'])} of the planned one\n")


TABLES = {"size": at_size, "tiny": tiny, "different": unlike_layers}


if __name__ == "__main__":
    run_tables("benchmarks.pipeline", __doc__, TABLES, None)
