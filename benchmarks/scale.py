"""How long tables, texts and pages take after ``partition``, by the number of devices.

    python -m benchmarks.scale                     # Llama 3 70B on 64 devices; Llama 3.1 405B on 16,384
    python -m benchmarks.scale --cases 70B

Each case is a process of its own. Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.field.models import Sizes, decoder
from partitioner import partition

CASES: Mapping[str, tuple[Sizes, int, int, str, Mapping[str, int]]] = {
    "70B": (Sizes(8192, 64, 8, 128, 28672, 128256), 80, 16, "h100:8x8", {"pipeline": 8, "tensor": 8}),
    "405B": (Sizes(16384, 128, 8, 128, 53248, 128256), 126, 2048, "h100:2048x8", {"pipeline": 16, "zero1": 128, "tensor": 8}),
}
"""Name -> sizes, layers, rows of 2,048 tokens, cluster, mesh."""


def timed(name: str) -> None:
    """Print the seconds of each step of a case."""
    sizes, layers, rows, cluster, mode = CASES[name]
    with torch.device("meta"):
        model = decoder(name, "Llama", sizes, num_hidden_layers=layers).make()
        tokens = torch.zeros(rows, 2048, dtype=torch.int64)

    def seconds(words: str, work: Callable[[], object]) -> None:
        started = time.process_time()
        result = work()
        size = f"{len(result):,} characters" if isinstance(result, str) else ""
        print(f"{name:6s}{words:14s}{time.process_time() - started:8.1f} s  {size}", flush=True)

    started = time.process_time()
    inputs = {"input_ids": tokens, "labels": tokens}
    devices = math.prod(mode.values())
    pm = partition(model, devices, mode, example_kwargs=inputs, cluster=cluster, precision="bf16-mixed", progress=False)
    print(f"{name:6s}{'partition':14s}{time.process_time() - started:8.1f} s  {mode} on {cluster}", flush=True)
    seconds("print(pm)", lambda: repr(pm))
    seconds("explain()", pm.explain)
    seconds("simulate()", pm.simulate)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        seconds("save_report()", lambda: pm.save_report(page))
        print(f"{name:6s}{'report':14s}{page.stat().st_size / 1e6:8.1f} MB", flush=True)


def main() -> None:
    """Time each case in a process of its own."""
    parser = argparse.ArgumentParser(description="Seconds of tables, texts and pages.")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    for name in parser.parse_args().cases:
        process = multiprocessing.get_context("spawn").Process(target=timed, args=(name,))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
