"""Data parallel with a loader in each process: every rank reads its own rows, as with DistributedDataParallel.

    python examples/distributed_sampler.py                                             # both ranks here: they get whole batches
    torchrun --standalone --nproc-per-node 2 examples/distributed_sampler.py           # a process a rank, with its own rows

    rank 0   rows 0 2 4 ... ──> forward ─ backward ─┐
                                                    ├ gradients of the whole batch
    rank 1   rows 1 3 5 ... ──> forward ─ backward ─┘

The loss of a step is that of all rows on every rank, so both ways print the same numbers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from partitioner import partition


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="data", help="data, fsdp, zero1 or zero2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of all ranks together")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    x = torch.randn(512, 16)
    data = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(dim=1))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    own_rows = "RANK" in os.environ
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    pm = partition(model, ranks, options.mode, example_inputs=(x[:64],), inputs="local" if own_rows else "global")
    n_parts = pm.data_parallel_size if own_rows else 1
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        data, n_parts, pm.data_parallel_rank if own_rows else 0, shuffle=False
    )
    loader = DataLoader(data, options.batch_size // n_parts, sampler=sampler)

    optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3)
    speaks = os.environ.get("RANK", "0") == "0"
    if speaks:
        print(f"each process passes {options.batch_size // n_parts} of {options.batch_size} rows\n\n epoch   loss of the last batch")
    loss = torch.zeros(())
    for epoch in range(1, options.epochs + 1):
        for rows, labels in loader:
            loss = pm.train_step(rows, target=labels, loss_fn=nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        if speaks:
            print(f"{epoch:6d}{loss.item():25.6f}", flush=True)


if __name__ == "__main__":
    main()
