"""Predicted beside measured step times on this machine: with every operation timed, and with rates fitted to those times.

    python -m benchmarks.predictions              # all ranks in one process, then two processes on gloo
    python -m benchmarks.predictions --rounds 15  # on a noisy machine

A program is simulated with costs of this machine, and run. In one process of one thread ranks take turns: a step takes as long as all of
them compute together, and is measured in processor seconds, of which other processes take none. Two processes compute at once, and
messages take what was measured between them just before. The last lines tell the median error and the rank correlation (Spearman) over
all placements.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rounds import measure, run_tables, say
from benchmarks.transformer import VOCABULARY, gpt, loss_of
from cost_models.cost_model import CostModel
from cost_models.devices import Device, Link
from cost_models.hardware import Cluster
from cost_models.measured.costs import MeasuredCosts, fitted
from cost_models.simulator.simulate import simulate_programs
from partitioner import PartitionedModel, partition

MACHINE = Device("this machine", {"float32": 1e11}, 2**34, 1e10)
"""What no measurement tells; operations that cannot be timed alone are priced with it."""


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
    """A loss for models of numbers."""
    return nn.functional.mse_loss(output, target)


def given(model: str) -> tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """A model, a batch, its target and its loss."""
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
    )
)

IN_TWO_PROCESSES = tuple(
    Placement(model, mesh, microbatches)
    for model in ("perceptron", "GPT 4 x 128", "GPT 4 x 256")
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
    """The model, and a step of it."""
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


def simulated(pm: PartitionedModel, placement: Placement, costs: CostModel, link: Link | None) -> float:
    """Seconds of a step; without a link ranks take turns and send nothing."""
    cluster = Cluster([MACHINE] * placement.ranks, link or Link(0.0, 1e30))
    rows = pm.data_parallel_size
    simulation = simulate_programs(pm.programs(), cluster, costs, pm.plan.batch_size, n_row_parts=rows)
    if link is not None:
        return simulation.step_time
    return simulation.step_time * placement.ranks * (1 - simulation.bubble_fraction)


def in_one_process(rounds: int) -> list[Prediction]:
    """Every placement of ``IN_ONE_PROCESS``."""
    found = [(placement, *partitioned(placement)) for placement in IN_ONE_PROCESS]
    seconds: dict[Placement, list[float]] = {placement: [] for placement in IN_ONE_PROCESS}
    for _ in range(rounds):
        for placement, _, step in found:
            start = time.process_time()
            step()
            seconds[placement].append(time.process_time() - start)
    costs = MeasuredCosts()
    timed = [simulated(pm, placement, costs, None) for placement, pm, _ in found]
    calibrated = fitted(costs.samples)
    return [
        Prediction(placement, statistics.median(seconds[placement]), told, simulated(pm, placement, calibrated, None))
        for (placement, pm, _), told in zip(found, timed, strict=True)
    ]


def in_two_processes(rounds: int) -> Iterator[Prediction]:
    """Every placement of ``IN_TWO_PROCESSES``; the first process predicts."""
    costs = MeasuredCosts()
    found = [(placement, *partitioned(placement)) for placement in IN_TWO_PROCESSES]
    measured = {placement: measure({"step": step}, rounds, repeats=2)["step"].wall for placement, _, step in found}
    links = {"message": message_link(), "collective": collective_link()}
    chosen = [links["message" if placement.microbatches else "collective"] for placement, *_ in found]
    if dist.get_rank() == 0:
        timed = [simulated(pm, placement, costs, link) for (placement, pm, _), link in zip(found, chosen, strict=True)]
        calibrated = fitted(costs.samples)
        for (placement, pm, _), link, told in zip(found, chosen, timed, strict=True):
            yield Prediction(placement, measured[placement], told, simulated(pm, placement, calibrated, link))
    dist.barrier()


def message_link() -> Link:
    """Half a round trip of a small and of a large message."""

    def trip(tensor: Tensor) -> None:
        for sender in (0, 1):
            if dist.get_rank() == sender:
                dist.send(tensor, 1 - sender)
            else:
                dist.recv(tensor, sender)

    return _fitted_link(trip, 2)


def collective_link() -> Link:
    """What the ring of two ranks needs in an all-reduce: two steps of half the tensor."""
    return _fitted_link(dist.all_reduce, 2, 1)


def _fitted_link(send: Callable[[Tensor], object], steps: int, passes: float = 2) -> Link:
    """Latency of a step and bandwidth, from two sizes.

    Args:
        steps: messages one after the other.
        passes: how often the whole tensor is sent in them.
    """
    seconds = {}
    for count in (1, 2**18):
        tensor = torch.zeros(count)
        seconds[count] = measure({"send": lambda tensor=tensor: send(tensor)}, 9, repeats=5)["send"].wall  # type: ignore[misc]
    return Link(seconds[1] / steps, passes * 4 * 2**18 / max(seconds[2**18] - seconds[1], 1e-9))


def show(title: str, found: Sequence[Prediction], say_line: Callable[[str], None]) -> None:
    """The table, and what it comes to."""
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
    """The second table."""
    found = list(in_two_processes(rounds))
    if found:
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
