"""Predicted beside measured step times on this machine: with every operation timed, and with rates fitted to those times.

    python -m benchmarks.predictions              # all ranks in one process, then two processes on gloo
    python -m benchmarks.predictions --rounds 15  # on a noisy machine

A program is simulated with costs of this machine, and run. In one process of one thread ranks alternate: a step takes as long as all of
them compute, and add up what others have, together; it is measured in processor seconds, of which other processes take none. Two processes
compute at once, and messages take what is measured between them. Each round measures every placement, times the operations and messages
anew and predicts with them, since a shared machine is not equally fast all the time; the tables show medians over rounds. The last lines
tell the median error and the rank correlation (Spearman) over all placements.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rounds import measure, run_tables, say
from benchmarks.transformer import VOCABULARY, gpt, loss_of
from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster
from cost_models.hardware.devices import Device, Link
from cost_models.hardware.measure import gloo_link
from cost_models.hardware.timer import median_seconds
from cost_models.profiling.op_times import MeasuredCosts, fitted
from cost_models.simulator.simulate import simulate_programs
from partitioner import PartitionedModel, partition


@functools.cache
def machine() -> Device:
    """Return a device for operations that cannot be timed alone, such as copies into messages: its memory has the speed of copies."""
    numbers = torch.rand(_ADDED_FLOATS)
    return Device(
        "this machine", {"float32": 1e11}, 2**34, 2 * numbers.nbytes / median_seconds(numbers.clone, numbers.device, among_others=True)
    )


@dataclass(frozen=True)
class Placement:
    """One model on devices.

    Attributes:
        model: its name.
        mesh: what is cut how often.
        microbatches: of a step.
        recompute: what the backward computes again.
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    microbatches: int | None = None
    recompute: str = "none"

    @property
    def ranks(self) -> int:
        """How many devices it takes."""
        product = 1
        for _, size in self.mesh:
            product *= size
        return product

    def __str__(self) -> str:
        mesh = " ".join(f"{name}={size}" for name, size in self.mesh)
        parts = f", {self.microbatches} microbatches" if self.microbatches else ""
        return f"{mesh}{parts}{', recompute' if self.recompute != 'none' else ''}"


def perceptron() -> nn.Sequential:
    """Eight wide layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())))


def convolutions() -> nn.Sequential:
    """Six convolutions on small images."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the squared error."""
    return nn.functional.mse_loss(output, target)


def given(model: str) -> tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return a model, a batch, its target and its loss."""
    generator = torch.Generator().manual_seed(1)
    if model == "perceptron":
        return perceptron(), torch.rand(256, 512, generator=generator), torch.zeros(256, 512), squares
    if model == "convolutions":
        return convolutions(), torch.rand(16, 3, 24, 24, generator=generator), torch.zeros(16, 10), squares
    layers, width = (int(part) for part in model.removeprefix("GPT ").split(" x "))
    tokens = torch.randint(0, VOCABULARY, (8, 32), generator=generator)
    return gpt(layers, width), tokens, tokens, loss_of


IN_ONE_PROCESS = tuple(
    Placement(model, mesh, microbatches, recompute)
    for model in ("perceptron", "convolutions", "GPT 4 x 128", "GPT 4 x 256")
    for mesh, microbatches, recompute in (
        ((("model", 2),), None, "none"),
        ((("pipeline", 2),), 4, "none"),
        ((("pipeline", 4),), 8, "full"),
        ((("data", 2),), None, "none"),
        ((("data", 2), ("tensor", 2)), None, "none"),
    )
)

IN_TWO_PROCESSES = tuple(
    Placement(model, mesh, microbatches)
    for model in ("perceptron", "convolutions", "GPT 4 x 128", "GPT 4 x 256")
    for mesh, microbatches in (
        ((("pipeline", 2),), 2),
        ((("pipeline", 2),), 4),
        ((("pipeline", 2),), 8),
        ((("data", 2),), None),
        ((("tensor", 2),), None),
    )
)


@dataclass(frozen=True)
class Prediction:
    """One row of the table; seconds a step."""

    placement: Placement
    measured: float
    timed: float
    calibrated: float


def partitioned(placement: Placement) -> tuple[PartitionedModel, Callable[[], Tensor]]:
    """Return the model, and a step of it."""
    model, batch, target, loss = given(placement.model)
    pm = partition(
        model,
        ["cpu"] * placement.ranks,
        dict(placement.mesh),
        example_inputs=(batch,),
        n_microbatches=placement.microbatches,
        schedule="1F1B" if placement.microbatches else None,
        stages_per_device=1 if placement.microbatches else None,
        recompute=placement.recompute,
        progress=False,
    )

    def step() -> Tensor:
        pm.zero_grad()
        return pm.train_step(batch, target=target, loss_fn=loss)

    step()
    return pm, step


def simulated(pm: PartitionedModel, placement: Placement, costs: CostModel, link: Link, *, in_turn: bool) -> float:
    """Return the seconds of a step; for sequential ranks, compute of all ranks and copies of received values."""
    cluster = Cluster([machine()] * placement.ranks, link)
    simulation = simulate_programs(pm.programs(), cluster, costs, pm.plan.batch_size, n_row_parts=pm.traced.programs.rows.count)
    if not in_turn:
        return simulation.step_time
    computed = simulation.step_time * placement.ranks * (1 - simulation.bubble_fraction)
    return computed + sum(each.end - each.start for each in simulation.timeline.communicated if each.kind != "message")


@dataclass(frozen=True)
class Contestant:
    """A placement that is measured and predicted, round after round; the machine is not equally fast all the time."""

    placement: Placement
    pm: PartitionedModel
    step: Callable[[], Tensor]
    rounds: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def prediction(self) -> Prediction:
        """The medians of all rounds."""
        return Prediction(self.placement, *(statistics.median(column) for column in zip(*self.rounds, strict=True)))


def in_one_process(rounds: int) -> list[Prediction]:
    """Predict every placement of ``IN_ONE_PROCESS``."""
    contestants = [Contestant(placement, *partitioned(placement)) for placement in IN_ONE_PROCESS]
    for _ in range(rounds):
        _round(contestants, _processor_seconds, adding_link(), in_turn=True)
    return [each.prediction for each in contestants]


def in_two_processes(rounds: int) -> list[Prediction]:
    """Predict every placement of ``IN_TWO_PROCESSES``; both processes time operations at once, as they compute at once."""
    contestants = [Contestant(placement, *partitioned(placement)) for placement in IN_TWO_PROCESSES]
    for _ in range(rounds):
        _round(contestants, _wall_seconds, swap_link(), in_turn=False)
    return [each.prediction for each in contestants]


def _round(contestants: Sequence[Contestant], seconds: Callable[[Callable[[], Tensor]], float], link: Link, *, in_turn: bool) -> None:
    """Measure each placement, time the operations anew, and predict with both kinds of costs."""
    measured = [seconds(each.step) for each in contestants]
    costs = MeasuredCosts()
    timed = [simulated(each.pm, each.placement, costs, link, in_turn=in_turn) for each in contestants]
    calibrated = fitted(costs.samples)
    for each, step, told in zip(contestants, measured, timed, strict=True):
        each.rounds.append((step, told, simulated(each.pm, each.placement, calibrated, link, in_turn=in_turn)))


def _processor_seconds(step: Callable[[], Tensor]) -> float:
    step()
    start = time.process_time()
    step()
    return time.process_time() - start


def _wall_seconds(step: Callable[[], Tensor]) -> float:
    return measure({"step": step}, 1, repeats=2)["step"].wall


def adding_link() -> Link:
    """Return a link as fast as one rank adds its tensor to another's: a collective of two in one process does only that."""
    one, other = torch.rand(2, _ADDED_FLOATS)
    return Link(0.0, one.nbytes / median_seconds(lambda: one + other, one.device, among_others=True), copies=False)


def swap_link(rounds: int = 5) -> Link:
    """Return the link of two ranks that compute and swap a tensor, as stages do; swaps without work are several times as fast.

    The rank that finishes first waits, the longer the more work both had: they work for milliseconds, as between messages of a step.
    """
    other, left = 1 - dist.get_rank(), torch.rand(256, 256)

    def started(count: int) -> tuple[dist.Work | None, ...]:
        return dist.isend(torch.zeros(count), other), dist.irecv(torch.empty(count), other)

    def step(count: int, *, beside: bool) -> None:
        works = started(count) if beside else ()
        for _ in range(_PRODUCTS):
            torch.mm(left, left)
        for work in started(count) if count and not beside else works:
            assert work is not None  # both ranks are in the group
            work.wait()

    steps = {(0, False): partial(step, 0, beside=False)}
    steps |= {(count, False): partial(step, count, beside=False) for count in _MESSAGE_FLOATS}
    steps[_FLOATS_BESIDE_WORK, True] = partial(step, _FLOATS_BESIDE_WORK, beside=True)
    found = {key: each.wall for key, each in measure(steps, rounds, repeats=10).items()}
    added = {key: max(seconds - found[0, False], 1e-6) for key, seconds in found.items() if key[0]}
    share = min(added[_FLOATS_BESIDE_WORK, True] / added[_FLOATS_BESIDE_WORK, False], 1.0)
    return gloo_link({4.0 * count: added[count, False] for count in _MESSAGE_FLOATS}, share)


_ADDED_FLOATS = 2**18
_PRODUCTS = 16
_MESSAGE_FLOATS = (2**10, 2**14, 2**16, 2**18, 2**20, 2**22)
_FLOATS_BESIDE_WORK = 2**20


def show(title: str, found: Sequence[Prediction], say_line: Callable[[str], None]) -> None:
    """Print the table, and its summary."""
    rows = []
    for each in found:
        seconds = [f"{value * 1e3:.2f}" for value in (each.measured, each.timed, each.calibrated)]
        errors = [f"{value / each.measured - 1:+.0%}" for value in (each.timed, each.calibrated)]
        rows.append((each.placement.model, str(each.placement), *seconds, *errors))
    head = ("model", "placement", "measured ms", "timed ms", "calibrated ms", "error", "error")
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    say_line(title)
    for row in [head, *rows]:
        cells = [cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))]
        say_line("  " + "  ".join(cells))
    predicted: Mapping[str, list[float]] = {"timed": [each.timed for each in found], "calibrated": [each.calibrated for each in found]}
    measured = [each.measured for each in found]
    for name, times in predicted.items():
        off = statistics.median(abs(told / real - 1) for told, real in zip(times, measured, strict=True))
        say_line(f"  {name}: median error {off:.1%}, Spearman {_spearman(times, measured):.3f}, {len(found)} placements")
    say_line("")


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks."""
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (one, other)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def two_processes(rounds: int) -> None:
    """Print the second table."""
    found = in_two_processes(rounds)
    if dist.get_rank() == 0:
        show("Two processes of one thread, gloo", found, say)


def main(argv: Sequence[str] | None = None) -> None:
    """Both tables; under torchrun the second."""
    if "RANK" not in os.environ:
        torch.set_num_threads(1)
        arguments = list(sys.argv[1:] if argv is None else argv)
        rounds = int(arguments[arguments.index("--rounds") + 1]) if "--rounds" in arguments else 7
        show("All ranks in one process of one thread", in_one_process(rounds), print)
    run_tables("benchmarks.predictions", __doc__, {"gloo": two_processes}, argv)


if __name__ == "__main__":
    main()
