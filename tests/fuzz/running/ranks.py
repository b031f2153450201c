"""Run cases in processes that live long, one a rank, connected by gloo; a case that breaks them gets others afterwards."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.fuzz.programs.generator import Case
from tests.fuzz.running.outcome import Outcome, run_case
from tests.support.processes.processes import Workers

START = 300.0
"""Seconds that processes may take to import torch."""

LONGEST_WAIT = timedelta(seconds=20)
"""How long a rank waits for another: what would hang ends with an error that names it."""

ENDED = "ended: "
"""Begins the line that a rank prints when it has an outcome: all that is known of it where another rank has none."""


class Ranks:
    """Processes of all ranks, for one case after the other."""

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds
        self._workers: Workers | None = None

    def run(self, case: Case) -> Outcome:
        """Return the case's outcome: the worst of all ranks."""
        workers = self._started()
        try:
            answers = workers.call(run_on_rank, case, timeout=self._seconds)
        except TimeoutError as error:
            said = [line for line in str(error).splitlines() if line.startswith(("-- rank", ENDED))]
            return Outcome("timeout", f"not all ranks ended within {self._seconds:.0f} s", "\n".join([*said, str(error)[-1500:]]))
        outcomes = [answer.value or Outcome("raw", repr(answer.error)) for answer in answers]
        worst = min(outcomes, key=lambda each: ("timeout", "raw", "wrong", "invalid", "refused", "equal").index(each.kind))
        if worst.kind == "refused" and any(each.kind != "refused" for each in outcomes):
            worst = Outcome("raw", f"refused by some ranks: {worst.reason}", worst.detail)
        if worst.kind not in {"equal", "invalid"} and not self._is_connected():
            self.close()
        return worst

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None

    def _started(self) -> Workers:
        """Return connected processes; new ones where one has ended."""
        if self._workers is None or not self._workers.usable:
            self.close()
            self._workers = Workers(self._size)
            self._workers.values(connect, timeout=START)
        return self._workers

    def _is_connected(self) -> bool:
        """Return whether ranks still reach each other in step after a case that failed."""
        if self._workers is None or not self._workers.usable:
            return False
        try:
            return self._workers.values(total, 1.0, timeout=30.0) == [float(self._size)] * self._size
        except (AssertionError, TimeoutError):
            return False


def connect() -> None:
    """Join the other ranks, and import what cases need."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LONGEST_WAIT)


def total(number: float) -> float:
    """Return the sum of a number of each rank."""
    value = torch.tensor(number)
    dist.all_reduce(value)
    return float(value)


def run_on_rank(case: Case) -> Outcome:
    """Return this rank's outcome of a case."""
    outcome: Any = run_case(case, process=int(os.environ["RANK"]))
    sys.stdout.write(f"{ENDED}{outcome.kind}: {outcome.reason}\n")
    sys.stdout.flush()
    return Outcome(outcome.kind, outcome.reason, outcome.detail)
