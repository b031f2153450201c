"""A training loop of accelerate, around a partitioned model: only the line with ``partition``, and one import, are new.

    python examples/accelerate_training.py                                             # both ranks here
    torchrun --standalone --nproc-per-node 2 examples/accelerate_training.py           # a process a rank

    loader ──> Accelerator.prepare ──> every rank reads every batch ──> pm(rows) ── backward ── clip ── step

Both ways print the same losses. The second half is trained again from the state that was saved after the first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from partitioner import partition
from partitioner.integrations.accelerate import Accelerator


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="pipeline", help="pipeline, fsdp, tensor, data, ...")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "accelerate-training"))
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    x = torch.randn(32 * options.steps, 16)
    data = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(dim=1))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    accelerator = Accelerator(cpu=True)
    pm = partition(model, 2, options.mode, example_inputs=(x[:32],), progress=False)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    pm, optimizer, loader, scheduler = accelerator.prepare(pm, optimizer, DataLoader(data, 32), scheduler)

    accelerator.print("  step       loss")

    def train(batches: DataLoader[tuple[torch.Tensor, ...]], first: int) -> None:
        for step, (rows, labels) in enumerate(batches, start=first):
            with accelerator.accumulate(pm):
                loss = nn.functional.cross_entropy(pm(rows), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(pm.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.print(f"{step:6d}{loss.item():11.6f}", flush=True)
            if step == options.steps // 2 and first == 1:
                accelerator.save_state(options.folder)

    train(loader, 1)
    accelerator.print("again from the saved state")
    accelerator.load_state(options.folder)
    train(accelerator.skip_first_batches(loader, options.steps // 2), options.steps // 2 + 1)
    accelerator.end_training()


if __name__ == "__main__":
    main()
