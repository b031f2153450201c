"""Shared code of benchmarks: alternating contestants, medians over rounds, tables, and the processes that run them."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

Name = TypeVar("Name", bound=Hashable)
"""Of a contestant."""


@dataclass(frozen=True)
class Measured:
    """Medians over rounds.

    Attributes:
        wall: seconds a step, of the slower process.
        processor: CPU seconds a step, summed over the processes.
        walls: of each round, what ``wall`` is the median of.
    """

    wall: float
    processor: float
    walls: tuple[float, ...]

    def beside(self, other: Measured) -> float:
        """Return the ratio of wall times: the median over rounds, in each of which the machine was equally fast for both."""
        return statistics.median(one / another for one, another in zip(self.walls, other.walls, strict=True))


def measure(steps: Mapping[Name, Callable[[], object]], rounds: int, repeats: int) -> dict[Name, Measured]:
    """Run the contestants in sequence, round after round, and take medians."""
    wall: dict[Name, list[float]] = {name: [] for name in steps}
    processor: dict[Name, list[float]] = {name: [] for name in steps}
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
    return {name: Measured(statistics.median(wall[name]), statistics.median(processor[name]), tuple(wall[name])) for name in steps}


def ratio(one: Measured, other: Measured) -> str:
    """Format the ratio of two wall times."""
    return f"{one.wall / other.wall:.2f}x"


def milliseconds(found: Measured) -> str:
    """Format the wall time of a step."""
    return f"{found.wall * 1e3:.1f}"


def say(text: str) -> None:
    """Print, once for all processes."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with aligned columns."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    say(title)
    for row in [head, *rows]:
        say("  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]))
    say("")


def run_tables(
    module: str,
    description: str | None,
    tables: Mapping[str, Callable[[int], None]],
    argv: Sequence[str] | None,
    alone: Mapping[str, Callable[[int], None]] | None = None,
) -> None:
    """Read the arguments, start two processes of one thread each, and print the tables.

    Args:
        module: the benchmark, as ``python -m`` names it.
        tables: what prints one, given the number of rounds.
        alone: tables of this one process, printed first.
    """
    alone = alone or {}
    arguments = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=7, help="rounds of which medians are taken (default 7)")
    arguments.add_argument("--only", choices=sorted({**tables, **alone}), help="print one table")
    given = arguments.parse_args(argv)
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        for name, show in alone.items():
            if given.only in (None, name):
                show(given.rounds)
        if given.only in alone:
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
        chosen = ["--only", given.only] if given.only else []
        raise SystemExit(subprocess.run([*command, "--rounds", str(given.rounds), *chosen], check=False).returncode)
    dist.init_process_group("gloo")
    say(f"torch {torch.__version__}, 2 processes, 1 thread each, gloo; medians of {given.rounds} interleaved rounds\n")
    for name, show in tables.items():
        if given.only in (None, name):
            show(given.rounds)
    dist.destroy_process_group()
