"""The script that torchrun runs on every rank to measure a placement: build the model, partition it by the plan, time its steps."""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.api import partition
from partitioner.experiments.models.subject import make_model
from partitioner.experiments.run.sweep_options import OF_TRACE, read_options
from passes.ir.plan import Plan
from passes.ir.torch_private import pytree

_WARM_UP = 2
_STEPS = 5


def main(folder: Path) -> None:
    """Measure a placement; rank 0 writes the largest time and memory of all ranks to ``measured.json``.

    Args:
        folder: the folder with the files ``model`` (pickled source), ``plan.json`` and ``options.json``.
    """
    torch.manual_seed(0)
    made = make_model("model", pickle.loads((folder / "model").read_bytes()))  # noqa: S301  the sweep wrote it
    plan = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
    devices = plan.n_ranks
    options = read_options((folder / "options.json").read_text(encoding="utf-8"))
    beside = {name: value for name, value in options.items() if name in OF_TRACE}
    pm = partition(made.model, devices, example_inputs=made.args, example_kwargs=made.kwargs, plan=plan, **beside)
    step = _step(pm, made.args or (), dict(made.kwargs))
    for _ in range(_WARM_UP):
        step()
    seconds = statistics.median(_time(step) for _ in range(_STEPS))
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    worst = torch.tensor([seconds, float(memory)], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        measured = {"step_time": worst[0].item(), "memory": int(worst[1].item()) or None}
        (folder / "measured.json").write_text(json.dumps(measured), encoding="utf-8")


def _step(pm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
    """Return a function that runs one step: forward and backward if the model trains, else the forward."""

    def train() -> None:
        pm.train_step(*args, loss_fn=_mean_square, **kwargs)
        pm.zero_grad()

    def evaluate() -> None:
        with torch.no_grad():
            pm(*args, **kwargs)

    return train if pm.training else evaluate


def _mean_square(output: Any, _target: Any) -> Tensor:
    """Return a loss that depends on every differentiable result."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def _time(step: Callable[[], None]) -> float:
    """Return the seconds of a step on this rank, from a barrier of all ranks to the end of its work."""
    dist.barrier()
    started = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(Path(sys.argv[1]))
