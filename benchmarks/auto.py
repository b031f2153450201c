"""How good the plans of ``mode="auto"`` are: beside every plan that there is, and beside a published one.

    python -m benchmarks.auto                       # both tables; starts two processes of one thread each, gloo
    python -m benchmarks.auto --only published      # simulated: nothing runs

1. measured: for each model all modes on two processes, pipelines with every schedule and 2, 4 and 8 microbatches, and the plan that the
   planner chooses for this machine (``Cluster.detect``). All take turns, step by step. ``best`` is the fastest of all; ``data``, ``equal
   layers`` (1F1B with 4 microbatches, as many layers on each) and ``tensor`` are what one would try first. Numbers are the time of the
   chosen plan over theirs: below 1 it is faster.
2. published: models and device counts of Megatron-LM (``benchmarks.published``), the published configuration and the chosen plan on the
   same clock, with the same memory: mixed precision, 18 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline import unlike
from benchmarks.predictions import given
from benchmarks.published import Predicted, Row, plan_of_row, predicted, rows, subject_of
from benchmarks.rounds import Measured, measure, run_tables, say, table
from benchmarks.transformer import VOCABULARY, loss_of
from cost_models.hardware import Cluster
from partitioner import Constraints, partition
from partitioner.planner.describe import words_of
from partitioner.planner.plan_problem import PlanProblem
from partitioner.planner.plan_request import PlanRequest
from partitioner.schedules.catalog import SCHEDULES
from passes.ir.errors import PartitionError
from passes.ir.plan import Plan

MICROBATCHES = (2, 4, 8)
MODES = ("data", "zero1", "fsdp", "tensor", "sequence")
CHOSEN, EQUAL = "auto", "equal layers"


@dataclass(frozen=True)
class Case:
    """One model with its batch.

    Attributes:
        half: the layer that begins the second half.
    """

    name: str
    model: nn.Sequential
    batch: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    half: int


def cases() -> Iterator[Case]:
    """Models that want unlike plans: wide and narrow, of convolutions, with large weights at the end, with unlike layers."""
    for name in ("perceptron", "convolutions", "GPT 4 x 128", "GPT 4 x 256"):
        model, batch, target, loss = given(name)
        assert isinstance(model, nn.Sequential)
        yield Case(name, model, batch, target, loss, (len(model) + 1) // 2)
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (16, 64))
    yield Case("unlike layers", unlike(128), tokens, tokens, loss_of, 5)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    heavy = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))
    images = torch.rand(16, 3, 32, 32)
    yield Case("large weights", heavy, images, torch.randint(10, (16,)), nn.functional.cross_entropy, 6)


# -- measured --------------------------------------------------------------------------------------------------------------------------


def options(of: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every plan, by name: the arguments that ask for it."""
    for mode in MODES:
        yield mode, {"mode": mode}
    for schedule in SCHEDULES:
        for count in MICROBATCHES:
            yield f"{schedule}, {count} microbatches", {"mode": "pipeline", "schedule": schedule, "n_microbatches": count}
    equal = Constraints(split_spec={str(of.half): "beginning"})
    yield EQUAL, {"mode": "pipeline", "schedule": "1F1B", "n_microbatches": 4, "constraints": equal}
    yield CHOSEN, {"mode": "auto"}


def contestant(of: Case, cluster: Cluster, arguments: Mapping[str, Any]) -> tuple[Plan, Callable[[], Tensor]]:
    """A plan, and a step of it."""
    pm = partition(of.model, ["cpu"] * 2, example_inputs=(of.batch,), cluster=cluster, progress=False, **arguments)

    def step() -> Tensor:
        pm.zero_grad()
        return pm.train_step(of.batch, target=of.target, loss_fn=of.loss)

    step()
    return pm.plan, step


def compared(of: Case, cluster: Cluster, rounds: int) -> tuple[str, dict[str, Measured]]:
    """The chosen plan in words, and what every plan takes."""
    plans: dict[str, Plan] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    for name, arguments in options(of):
        try:
            plans[name], steps[name] = contestant(of, cluster, arguments)
        except PartitionError as error:
            say(f"  # {of.name}, {name}: {str(error).splitlines()[0]}")
    return words_of(plans[CHOSEN]), measure(steps, rounds, repeats=2)


def measured(rounds: int) -> None:
    """The first table."""
    if dist.get_rank() == 0:
        Cluster.detect(2)  # measured by one process, and remembered for both
    dist.barrier()
    cluster, lines = Cluster.detect(2), []
    for of in cases():
        words, found = compared(of, cluster, rounds)
        own = found[CHOSEN].wall
        best = min(found, key=lambda name: found[name].wall)
        ratios = [f"{own / found[name].wall:.2f}" for name in (best, "data", EQUAL, "tensor")]
        lines.append((of.name, str(len(found)), f"{own * 1e3:.1f}", *ratios, best, words))
        order = sorted(found, key=lambda name: found[name].wall)
        say(f"  # {of.name}, ms: {', '.join(f'{name} {found[name].wall * 1e3:.1f}' for name in order)}")
    heading = ("model", "plans", "auto ms", "auto / best", "/ data", f"/ {EQUAL}", "/ tensor", "best", "auto chose")
    table("Two processes of one thread, gloo; the chosen plan over others, medians", heading, lines)


# -- published -------------------------------------------------------------------------------------------------------------------------


def chosen(row: Row, cluster: Cluster) -> tuple[Plan, Predicted]:
    """The plan that is chosen for a row's model and devices, and what it comes to; as large as fits in mixed precision.

    The planner counts the optimizer's state in the precision of the parameters, the simulator 18 bytes a parameter: where the plan holds
    more than a device has, it is made again for so much less.
    """
    subject, limit = subject_of(row), float(cluster.devices[0].memory_bytes)
    while True:
        request = PlanRequest("auto", ("meta",) * row.sizes["devices"], memory_limit=int(limit), modules=subject.modules)
        plan = PlanProblem(subject.graph, cluster, request, None, None).solve()
        found = predicted(row, subject, plan, cluster)
        held = max(found.simulation.peak_memory)
        if held <= cluster.devices[0].memory_bytes:
            return plan, found
        limit *= 0.95 * cluster.devices[0].memory_bytes / held


def published(_rounds: int) -> None:
    """The second table; one process simulates."""
    lines: list[Sequence[str]] = []
    for row in rows() if dist.get_rank() == 0 else ():
        cluster = Cluster.preset("a100-80gb", nodes=row.sizes["devices"] // 8, devices_per_node=8)
        subject = subject_of(row)
        theirs = predicted(row, subject, plan_of_row(row, subject, cluster, "seqsel"), cluster)
        plan, ours = chosen(row, cluster)
        gap = "" if plan.gap is None else f"{plan.gap:.0%}"
        lines.append(
            (row.name, f"{theirs.seconds:.2f}", f"{ours.seconds:.2f}", f"{ours.seconds / theirs.seconds:.2f}", gap, words_of(plan))
        )
    table("Published configurations", ("model", "published s", "auto s", "auto / published", "gap", "auto chose"), lines)
    dist.barrier()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    run_tables("benchmarks.auto", __doc__, {"measured": measured, "published": published}, argv)


if __name__ == "__main__":
    main()
