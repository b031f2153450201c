"""The plan that ``mode="auto"`` finds for two processes beside all others that were enumerated, each measured.

    python -m benchmarks.auto_measured              # every model; starts two processes with one thread each, gloo
    python -m benchmarks.auto_measured --rounds 15  # on a noisy machine

Operations of each model are timed, and what two processes wait that swap tensors between pieces of work, seven times over; the planner
chooses with the medians. The others are each mode alone, the pipeline under two schedules with 2, 4 and 8 microbatches; ``data``,
``tensor`` and a pipeline are what one chooses without a planner. All plans of a model alternate; plans that decide alike are measured
once.

Then the automatic plan and those that took at most a tenth longer than the fastest alternate again, three times as often, and with them
the automatic plan a second time: the fastest of ten is partly the luckiest of ten, and what a plan takes beside itself is the noise. Ratios
are medians over rounds of what one plan took in a round by what the other took in it.

Steps take 70 to 250 ms. What a message takes on a shared machine differs by half a millisecond from one minute to the next, which is what
decides between the plans of a model whose step takes 20 ms.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.predictions import machine, squares, swap_link
from benchmarks.rounds import Measured, measure, milliseconds, run_tables, say, table
from benchmarks.tile import UNet
from benchmarks.transformer import VOCABULARY, gpt, loss_of
from cost_models.hardware.clusters import Cluster, Link
from cost_models.profiling.op_times import MeasuredCosts
from partitioner import partition
from partitioner.experiments.models.subject import trace_subject
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.describe import words_of
from passes.ir.plan import Plan

_ROUNDS_OF_TIMES = 7

Problem = tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]
"""A model, a batch, its target and its loss."""

_PIPELINES: dict[str, dict[str, object]] = {
    f"pipeline, {schedule}, {count} microbatches": {"mode": "pipeline", "schedule": schedule, "n_microbatches": count}
    for schedule in ("1F1B", "ZB1P")
    for count in (2, 4, 8)
}

OTHERS: dict[str, dict[str, object]] = {
    "data": {"mode": "data"},
    "tensor": {"mode": "tensor"},
    "tile": {"mode": {"tile": 2}},
    "fsdp": {"mode": "fsdp"},
    **_PIPELINES,
}
"""Enumerated settings: a name, and arguments of ``partition``."""


def perceptron() -> Problem:
    """Eight wide layers and many rows."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(768, 768), nn.GELU())]
    return nn.Sequential(*layers), torch.rand(512, 768), torch.zeros(512, 768), squares


def convolutions() -> Problem:
    """Six convolutions: activations are most of what there is."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, torch.rand(16, 3, 48, 48), torch.zeros(16, 10), squares


def transformer(layers: int, width: int) -> Problem:
    """Return a GPT with eight rows of 64 tokens."""
    tokens = torch.randint(0, VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(1))
    return gpt(layers, width), tokens, tokens, loss_of


def few_rows() -> Problem:
    """Wide layers and eight rows: weights are most of what would be sent."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    return nn.Sequential(*layers), torch.rand(8, 2048), torch.zeros(8, 2048), squares


def one_image() -> Problem:
    """Return a U-Net in which only space can be cut."""
    torch.manual_seed(0)
    return UNet(), torch.rand(1, 3, 384, 384), torch.zeros(1, 2, 384, 384), squares


def alexnet() -> Problem:
    """Return a model whose convolutions have most compute, and whose linear layers have most weights."""
    torch.manual_seed(0)
    channels, layers = (3, 32, 64, 64), []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    linear = (nn.Linear(64 * 16, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    model = nn.Sequential(*layers, nn.Flatten(), *linear)
    return model, torch.rand(64, 3, 32, 32), torch.zeros(64, 10), squares


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "GPT 8 x 128": lambda: transformer(8, 128),
    "GPT 4 x 256": lambda: transformer(4, 256),
    "few rows": few_rows,
    "one image": one_image,
    "AlexNet": alexnet,
}


def automatic(problem: Problem) -> Plan:
    """Return the plan of the first process, on all processes: their measurements differ.

    All time operations at once, as they compute at once; and again, round after round, since the machine is not equally fast all the time.
    """
    model, batch, _, _ = problem
    subject = trace_subject("the model", (model, (batch,)), training=True)
    request = PlanRequest(mode="auto", devices=("cpu",) * dist.get_world_size(), modules=subject.modules)
    costs, links = MeasuredCosts(), list[Link]()

    def plan() -> Plan:
        links.append(swap_link())
        return plans_auto(subject.graph, Cluster([machine()] * len(request.devices), _median(links)), request, costs)[0]

    for _ in range(_ROUNDS_OF_TIMES - 1):
        plan()  # asks for the times of what plans are made of
        dist.barrier()
        costs.time_again()
    text = [plan().to_json()]
    dist.broadcast_object_list(text)
    return Plan.from_json(text[0])


def _median(links: Sequence[Link]) -> Link:
    """Return each measured number at its median."""
    names = ("latency", "bandwidth", "host_share")
    return dataclasses.replace(links[0], **{name: statistics.median(getattr(link, name) for link in links) for name in names})


def step_of(problem: Problem, **asked: object) -> tuple[Plan, Callable[[], Tensor]]:
    """Return a placement's plan, and a training step of it, which has run once."""
    model, batch, target, loss = problem
    pm = partition(model, ["cpu"] * dist.get_world_size(), example_inputs=(batch,), progress=False, **asked)  # type: ignore[arg-type]

    def step() -> Tensor:
        pm.zero_grad()
        return pm.train_step(batch, target=target, loss_fn=loss)

    step()
    return pm.plan, step


def models(rounds: int) -> None:
    """Print a table for each model, and one of all."""
    ratios, summary = [], []
    for name, make in PROBLEMS.items():
        problem = make()
        plan, alike, steps = contestants(problem)
        first = measure(steps, rounds, repeats=3)
        last = measure(finalists(steps, first), 3 * rounds, repeats=3)
        of_automatic = {each: last["automatic"].beside(found) for each, found in last.items() if each != "automatic"}
        again = of_automatic.pop(_AGAIN)
        rows = [
            (each, milliseconds(found), milliseconds(last[each]) if each in last else "", _times(of_automatic.get(each)))
            for each, found in sorted(first.items(), key=lambda item: item[1].wall)
        ]
        table(f"{name}, {alike}: {words_of(plan)}", ("plan", "ms", "again, ms", "automatic takes"), rows)
        fastest = max(of_automatic, key=lambda each: of_automatic[each])
        ratios.append(of_automatic[fastest])
        summary.append((name, milliseconds(last["automatic"]), fastest, milliseconds(last[fastest]), _times(ratios[-1]), _times(again)))
    head = ("model", "automatic, ms", "the fastest other", "ms", "automatic takes", "beside itself")
    table("The automatic plan beside the fastest of the others", head, summary)
    say(f"at most 5 % slower than the best: {sum(ratio <= 1.05 for ratio in ratios)} of {len(ratios)} models")


_AGAIN = "automatic, again"


def contestants(problem: Problem) -> tuple[Plan, str, dict[str, Callable[[], Tensor]]]:
    """Return the automatic plan, the name of an equal decision among the rest, and a step of each plan."""
    plan = automatic(problem)
    alike, steps = "automatic", {"automatic": step_of(problem, plan=plan)[1]}
    for other, asked in OTHERS.items():
        if _suits(other, problem[1]):
            other_plan, step = step_of(problem, **asked)
            if _decided(other_plan) == _decided(plan):  # the same programs: measured once
                alike, steps["automatic"] = f"automatic, as {other}", step
            else:
                steps[other] = step
    return plan, alike, steps


def finalists(steps: Mapping[str, Callable[[], Tensor]], found: Mapping[str, Measured]) -> dict[str, Callable[[], Tensor]]:
    """Return the automatic plan twice, the fastest other plan, and those nearly as fast."""
    others = sorted((each for each in steps if each != "automatic"), key=lambda each: found[each].wall)
    fastest = min(each.wall for each in found.values())
    near = [each for each in others if each == others[0] or found[each].wall <= 1.1 * fastest]
    return {"automatic": steps["automatic"], **{each: steps[each] for each in near}, _AGAIN: steps["automatic"]}


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _decided(plan: Plan) -> object:
    """Return the decisions that plans of equal programs share."""
    in_time = plan.schedule, plan.n_microbatches, tuple(stage.first_node for stage in plan.stages)
    halos = tuple((run.first, run.last, run.strategy) for run in plan.halos)  # what they would have taken otherwise is no decision
    return plan.grid, plan.recompute, plan.axes, halos, in_time if len(plan.stages) > 1 else ()


def _suits(name: str, batch: Tensor) -> bool:
    """Return whether there is space or rows to cut."""
    if name == "tile":
        return batch.dim() == 4
    return name == "tensor" or len(batch) > 1


if __name__ == "__main__":
    run_tables("benchmarks.auto_measured", __doc__, {"models": models}, None)
