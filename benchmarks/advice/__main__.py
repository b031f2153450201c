"""Ask ``mode="auto"`` for a mesh, beside meshes that people type by hand; all are simulated on the same cluster.

python -m benchmarks.advice                            # 13 cases; some hours of a processor
python -m benchmarks.advice --cases 70B U-Net          # parts of names
python -m benchmarks.advice --store advice.db          # keeps the rows, and goes on where it was stopped
python -m benchmarks.advice --gallery docs/which-mesh.md

The last line of a case is the step of the chosen mesh relative to that of the best mesh by hand: at most 1.02 where the advice is as good
as trying them all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.advice.cases import CASES, Case
from benchmarks.advice.gallery import gallery, row_table
from partitioner.experiments import sweep
from partitioner.experiments.results.row import Row


def answer(case: Case, store: str | None, workers: int) -> tuple[Row, ...]:
    """Return the rows of a case: that of ``"auto"`` first, then those of its meshes."""
    results = sweep(
        {case.name: case.on_meta},
        case.n_devices,
        ["auto", *case.meshes],
        case.cluster,
        store=store,
        workers=workers,
        time_limit=case.limit,
        **case.options,
    )
    return tuple(sorted(results.table, key=lambda row: (row.mode != "auto", row.step_time or float("inf"))))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows of each case; write the gallery."""
    parser = argparse.ArgumentParser(description="Plans of mode='auto' beside meshes typed by hand.")
    parser.add_argument("--cases", nargs="*", default=[], help="parts of their names; default: all")
    parser.add_argument("--store", help="SQLite file of the rows")
    parser.add_argument("--workers", type=int, default=0, help="worker processes; 0: this process")
    parser.add_argument("--gallery", help="write the page of all cases")
    arguments = parser.parse_args(argv)
    answers: list[tuple[Case, tuple[Row, ...]]] = []
    for case in CASES:
        if arguments.cases and not any(words in f"{case.name} {case.cluster}" for words in arguments.cases):
            continue
        started = time.perf_counter()
        answers.append((case, answer(case, arguments.store, arguments.workers)))
        print(f"\n{case.name}, {case.cluster} ({time.perf_counter() - started:.0f} s)\n{row_table(answers[-1][1])}", flush=True)
    if arguments.gallery:
        Path(arguments.gallery).write_text(gallery(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
