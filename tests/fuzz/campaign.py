"""Many seeds in worker processes, with a limit of time for each, and a table of how they ended."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["Campaign"]

REDUCTION = 300.0
"""Seconds that the reduction of one failure may take."""

BY_TORCH = ", in the unpartitioned model"
"""Behind the reason of a process that PyTorch ended before anything was partitioned: no failure of ours."""


@dataclass
class Worker:
    """A process that runs one seed after the other."""

    process: Any
    connection: Connection
    seed: int = -1
    deadline: float = 0.0
    has_reference: bool = False


@dataclass
class Campaign:
    """Runs seeds and counts how they ended.

    Attributes:
        seconds: how long one seed may take before its process is ended.
        is_reducing: whether failures are reduced before they are printed.
        log: a file that gets one line for each seed.
    """

    seconds: float = 120.0
    is_reducing: bool = True
    log: str | None = None
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    took: float = 0.0

    @property
    def has_failed(self) -> bool:
        by_torch = sum(count for (_, reason), count in self.reasons.items() if reason.endswith(BY_TORCH))
        return self.counts["invalid"] > by_torch or any(self.counts[kind] for kind in ("wrong", "raw", "timeout"))

    def run(self, seeds: list[int], n_workers: int) -> None:
        """Run every seed; failures are printed as they are found."""
        start, waiting = time.monotonic(), seeds[::-1]
        workers = [self._start() for _ in range(min(n_workers, len(seeds)))]
        while workers:
            for worker in list(workers):
                if worker.seed < 0:
                    if not waiting:
                        worker.connection.send(None)
                        worker.process.join(timeout=10)
                        workers.remove(worker)
                        continue
                    self._give(worker, waiting.pop())
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for place, worker in enumerate(workers):
                if worker.connection in ready:
                    self._take(workers, place)
                elif worker.seed >= 0 and time.monotonic() > worker.deadline:
                    self._end(workers, place, "timeout", f"more than {self.seconds:.0f} s")
        self.took = time.monotonic() - start

    def _start(self) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_work, args=(theirs, self.is_reducing), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _give(self, worker: Worker, seed: int) -> None:
        worker.seed, worker.deadline, worker.has_reference = seed, time.monotonic() + self.seconds, False
        worker.connection.send(seed)

    def _take(self, workers: list[Worker], place: int) -> None:
        worker = workers[place]
        try:
            kind, reason, text, seconds = worker.connection.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            ended = f"the process ended with {worker.process.exitcode}"
            self._end(workers, place, *(("raw", ended) if worker.has_reference else ("invalid", f"{ended}{BY_TORCH}")))
            return
        if kind == "reference":
            worker.has_reference = True
            return
        if kind == "reducing":
            worker.deadline = time.monotonic() + REDUCTION + self.seconds
            sys.stdout.write(f"seed {worker.seed}: {reason}; reducing\n")
            sys.stdout.flush()
            return
        self._count(worker.seed, kind, reason, text, seconds)
        worker.seed = -1

    def _end(self, workers: list[Worker], place: int, kind: str, reason: str) -> None:
        """End a worker's process and start another."""
        worker = workers[place]
        worker.process.kill()
        worker.process.join()
        self._count(worker.seed, kind, reason, "", self.seconds)
        workers[place] = self._start()

    def _count(self, seed: int, kind: str, reason: str, text: str, seconds: float) -> None:
        self.counts[kind] += 1
        if reason:
            self.reasons[kind, reason] += 1
            self.examples.setdefault((kind, reason), []).append(seed)
        if self.log is not None:
            with Path(self.log).open("a", encoding="utf-8") as file:
                file.write(f"{seed}\t{kind}\t{reason}\t{seconds:.1f}\n")
        if kind not in {"equal", "refused"}:
            sys.stdout.write(f"\nseed {seed}: {kind}: {reason}\n{text}\n")
            sys.stdout.flush()

    def summary(self) -> str:
        """The counts as a table."""
        total = max(sum(self.counts.values()), 1)
        lines = [f"{total} seeds in {self.took:.0f} s at commit {_commit()}"]
        for kind in ("equal", "refused", "wrong", "raw", "timeout", "invalid"):
            lines.append(f"  {kind:8} {self.counts[kind]:6}  {100 * self.counts[kind] / total:5.1f} %")
            for (of, reason), count in self.reasons.most_common():
                if of == kind:
                    seeds = ", ".join(map(str, self.examples[of, reason][:6]))
                    lines.append(f"           {count:6}  {reason}  (seeds {seeds})")
        return "\n".join(lines) + "\n"


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _work(connection: Connection, is_reducing: bool) -> None:
    """Run the seeds that come through a pipe, in a process of its own."""
    import torch  # noqa: PLC0415  the parent does without it

    from tests.fuzz.generator import generate  # noqa: PLC0415
    from tests.fuzz.outcome import run_case  # noqa: PLC0415
    from tests.fuzz.reduction import reduce_case, reproduction  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    while (seed := connection.recv()) is not None:
        start = time.monotonic()
        case = generate(seed)
        outcome = run_case(case, lambda: connection.send(("reference", "", "", 0.0)))
        text = ""
        if outcome.is_failure:
            if is_reducing:
                connection.send(("reducing", f"{outcome.kind}: {outcome.reason}", "", 0.0))
                case = reduce_case(case, outcome, REDUCTION)
                outcome = run_case(case)
            text = reproduction(case, outcome)
        connection.send((outcome.kind, outcome.reason, text, time.monotonic() - start))
