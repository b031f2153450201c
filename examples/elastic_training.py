"""A training that outlives its processes: torchrun starts all ranks again when one dies, and they go on from the last whole checkpoint.

    python examples/elastic_training.py                                                # all ranks in this process, nothing saved
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic_training.py --folder checkpoints --kill 7 12

The last rank kills itself in steps 7 and 12. The losses, printed to the last bit, are those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from partitioner import PartitionedModel, partition

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return a step's batch, which follows from its number: a restarted run continues with the same batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 16, generator=generator)
    return x, (x[:, :4] * x[:, 4:8]).argmax(dim=1)


def save(folder: Path, step: int, pm: PartitionedModel, optimizer: torch.optim.Optimizer) -> None:
    """Write under another name, then rename: what is called ``step-...`` is whole, whenever a process dies or the disk is full."""
    unfinished = folder / f"unfinished-{step}"
    dcp.save(state_of(pm, optimizer), checkpoint_id=unfinished, no_dist=RANKS == 1)  # type: ignore[attr-defined]  # over when all have written
    if RANK == 0:
        unfinished.rename(folder / f"step-{step:06d}")
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)  # the rename itself is on disk
        os.close(descriptor)
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)


def load_last(folder: Path, pm: PartitionedModel, optimizer: torch.optim.Optimizer) -> int:
    """Load the last whole checkpoint; return its step, 0 if there is none."""
    found = sorted(folder.glob("step-*"))
    if not found:
        return 0
    state = state_of(pm, optimizer)
    dcp.load(state, checkpoint_id=found[-1], no_dist=RANKS == 1)  # type: ignore[attr-defined]
    pm.load_state_dict(state["model"])
    pm.load_optimizer_state_dict(optimizer, state["optimizer"])
    return int(found[-1].name.removeprefix("step-"))


def state_of(pm: PartitionedModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    return {"model": dict(pm.sharded_state_dict()), "optimizer": pm.sharded_optimizer_state_dict(optimizer)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, help="for checkpoints: one that all ranks read and write")
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="steps in which the last rank kills itself, one an attempt")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    # No init_process_group: partition() makes the process group, from keys that no earlier attempt has written.
    pm = partition(model, max(RANKS, 2), "pipeline", example_inputs=batch_of(1)[:1], n_microbatches=4, progress=False)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    first = 1
    if options.folder is not None:
        if RANK == 0:
            options.folder.mkdir(parents=True, exist_ok=True)
        if RANKS > 1:
            dist.barrier()
        first = load_last(options.folder, pm, optimizer) + 1
    for step in range(first, options.steps + 1):
        x, labels = batch_of(step)
        loss = pm.train_step(x, target=labels, loss_fn=nn.functional.cross_entropy)
        if RANK == RANKS - 1 and step in options.kill[ATTEMPT : ATTEMPT + 1]:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            print(f"{step:6d}{loss:14.6f}  {float(loss).hex()}", flush=True)
        if options.folder is not None and step % options.every == 0:
            save(options.folder, step, pm, optimizer)


if __name__ == "__main__":
    main()
