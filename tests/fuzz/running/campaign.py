"""Many seeds in worker processes, with a limit of time for each, and a table of how they ended."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

REDUCTION = 300.0
"""Seconds that the reduction of one failure may take."""

BY_TORCH = ", in the unpartitioned model"
"""Suffix of the reason of a process that PyTorch ended before anything was partitioned: no failure of ours."""

KINDS = ("equal", "refused", "wrong", "raw", "timeout", "invalid")


@dataclass
class Worker:
    """A process that runs one seed after the other."""

    process: Any
    connection: Connection
    seed: int = -1
    deadline: float = 0.0
    has_reference: bool = False


@dataclass(frozen=True)
class Ending:
    """How a seed ended.

    Attributes:
        kind: of the outcome.
        reason: of the outcome.
        text: a script that shows a failure.
        seconds: that it took of a processor.
        features: of the program.
    """

    kind: str
    reason: str = ""
    text: str = ""
    seconds: float = 0.0
    features: frozenset[str] = frozenset()


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
    features: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    took: float = 0.0

    @property
    def has_failed(self) -> bool:
        by_torch = sum(count for (_, reason), count in self.reasons.items() if reason.endswith(BY_TORCH))
        return self.counts["invalid"] > by_torch or any(self.counts[kind] for kind in ("wrong", "raw", "timeout"))

    def run(self, seeds: list[int], n_workers: int) -> None:
        """Run every seed with all of its ranks in one process; failures are printed as they are found."""
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

    def run_over_processes(self, seeds: list[int], size: int) -> None:
        """Run every seed over so many processes, one a rank; failures are printed as they are found."""
        start = time.monotonic()
        for seed, ending in _over_processes(seeds, size, self.seconds, self.is_reducing):
            self._count(seed, ending)
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
            told = worker.connection.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            code = worker.process.exitcode
            ended = f"the process ended with {code}"
            is_signal = code is not None and code < 0
            self._end(workers, place, *(("invalid", f"{ended}{BY_TORCH}") if is_signal and not worker.has_reference else ("raw", ended)))
            return
        if told == "reference":
            worker.has_reference = True
            return
        if isinstance(told, str):
            worker.deadline = time.monotonic() + REDUCTION + self.seconds
            sys.stdout.write(f"seed {worker.seed}: {told}; reducing\n")
            sys.stdout.flush()
            return
        self._count(worker.seed, told)
        worker.seed = -1

    def _end(self, workers: list[Worker], place: int, kind: str, reason: str) -> None:
        """End a worker's process and start another."""
        worker = workers[place]
        worker.process.kill()
        worker.process.join()
        self._count(worker.seed, Ending(kind, reason, seconds=self.seconds))
        workers[place] = self._start()

    def _count(self, seed: int, ending: Ending) -> None:
        kind, reason = ending.kind, ending.reason
        self.counts[kind] += 1
        self.features.update((feature, kind) for feature in ending.features)
        if reason:
            self.reasons[kind, reason] += 1
            self.examples.setdefault((kind, reason), []).append(seed)
        if self.log is not None:
            with Path(self.log).open("a", encoding="utf-8") as file:
                file.write(f"{seed}\t{kind}\t{reason}\t{ending.seconds:.1f}\n")
        if kind not in {"equal", "refused"}:
            sys.stdout.write(f"\nseed {seed}: {kind}: {reason}\n{ending.text}\n")
            sys.stdout.flush()

    def summary(self) -> str:
        """Return the counts as tables: by outcome and reason, and by feature."""
        total = max(sum(self.counts.values()), 1)
        lines = [f"{total} seeds in {self.took:.0f} s at commit {_commit()}"]
        for kind in KINDS:
            lines.append(f"  {kind:8} {self.counts[kind]:6}  {100 * self.counts[kind] / total:5.1f} %")
            for (of, reason), count in self.reasons.most_common():
                if of == kind:
                    seeds = ", ".join(map(str, self.examples[of, reason][:6]))
                    lines.append(f"           {count:6}  {reason}  (seeds {seeds})")
        lines.append(f"{'feature':20}{''.join(f'{kind:>9}' for kind in KINDS)}")
        features = sorted({feature for feature, _ in self.features})
        lines += [f"{feature:20}{''.join(f'{self.features[feature, kind]:9}' for kind in KINDS)}" for feature in features]
        return "\n".join(lines) + "\n"


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _counted(features: Iterable[str]) -> frozenset[str]:
    """Return the features that a table has a line for."""
    return frozenset("attends" if each.startswith("attends") else each for each in features)


def _prepare() -> None:
    """Set what holds for every process that runs seeds."""
    import torch  # noqa: PLC0415  the parent of workers does without it

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    gc.set_threshold(100_000, 20, 50)  # graphs are many objects that live


def _work(connection: Connection, is_reducing: bool) -> None:
    """Run the seeds that come through a pipe, in a process of its own."""
    _prepare()
    from tests.fuzz.programs.generator import generate  # noqa: PLC0415
    from tests.fuzz.running.outcome import run_case  # noqa: PLC0415
    from tests.fuzz.running.reduction import reduce_case  # noqa: PLC0415
    from tests.fuzz.running.reproduction import reproduction  # noqa: PLC0415

    while (seed := connection.recv()) is not None:
        start = time.process_time()
        case = generate(seed)
        features = _counted(case.program.features)
        outcome = run_case(case, lambda: connection.send("reference"))
        text = ""
        if outcome.is_failure:
            if is_reducing:
                connection.send(f"{outcome.kind}: {outcome.reason}")
                case = reduce_case(case, outcome, REDUCTION)
                outcome = run_case(case)
            text = reproduction(case, outcome)
        connection.send(Ending(outcome.kind, outcome.reason, text, time.process_time() - start, features))


def _over_processes(seeds: Iterable[int], size: int, seconds: float, is_reducing: bool) -> Iterable[tuple[int, Ending]]:
    """Yield each seed's ending over so many processes."""
    _prepare()
    from tests.fuzz.programs.generator import generate  # noqa: PLC0415
    from tests.fuzz.running.ranks import Ranks  # noqa: PLC0415
    from tests.fuzz.running.reduction import reduce_case  # noqa: PLC0415
    from tests.fuzz.running.reproduction import reproduction  # noqa: PLC0415

    ranks = Ranks(size, seconds)
    try:
        for seed in seeds:
            start = time.monotonic()
            case = generate(seed, size)
            features = _counted(case.program.features)
            outcome = ranks.run(case)
            text = ""
            if outcome.is_failure:
                if is_reducing and outcome.kind != "timeout":
                    case = reduce_case(case, outcome, REDUCTION, ranks.run)
                    outcome = ranks.run(case)
                text = reproduction(case, outcome)
            yield seed, Ending(outcome.kind, outcome.reason, text, time.monotonic() - start, features)
    finally:
        ranks.close()
