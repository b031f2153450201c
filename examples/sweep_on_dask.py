"""Sweep placements on Dask: each task plans and simulates one placement, on workers of this machine or of a cluster.

    pip install 'torch-partitioner[dask]'
    python examples/sweep_on_dask.py                                   # two worker processes here
    python examples/sweep_on_dask.py --scheduler tcp://scheduler:8786  # the workers of a running cluster

Workers trace the model themselves: it is named in a file that they can read, ``examples/sweep_on_dask.py:mlp``. A worker that is lost makes
rows with the reason, and ``retry_failures=True`` evaluates them again.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

import torch
from torch import Tensor, nn

from partitioner.experiments import Results, sweep


def mlp(depth: int = 4, width: int = 1024) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model on the meta device, and its batch."""
    with torch.device("meta"):
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers), (torch.zeros(64, width),)


def sweep_on(executor: Executor, n_workers: int, store: str | None = None) -> Results:
    """Return the rows of all placements, evaluated on an executor; two for each worker are submitted at the same time."""
    return sweep(
        models={"mlp": f"{Path(__file__).resolve()}:mlp(depth=4)"},
        devices=[2, 4],
        modes=["data", "fsdp", "tensor", "pipeline"],
        clusters="h100:1x4",
        precision=["bf16-mixed", "32-true"],
        store=store,
        executor=executor,
        workers=2 * n_workers,
    )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--scheduler", help="address of a running scheduler (default: two processes of this machine)")
    arguments.add_argument("--store", help="file that keeps the rows, to continue a sweep")
    given = arguments.parse_args(argv)

    dask = importlib.import_module("dask.distributed")  # not above: other executors need no Dask
    local = None if given.scheduler else dask.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with dask.Client(given.scheduler or local) as client:
        results = sweep_on(client.get_executor(), len(client.scheduler_info()["workers"]), given.store)
    if local is not None:
        local.close()
    print(results.pareto())


if __name__ == "__main__":
    main()
