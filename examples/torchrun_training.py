"""One script for one process or many: nothing in it says where the ranks are.

    python examples/torchrun_training.py                                               # both ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/torchrun_training.py             # a process a rank, over gloo or NCCL

The program of each rank is the same in both, and so are the losses that it prints.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import partition


class Residual(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.layers(x)
        return x + update


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)

    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    torch.manual_seed(0)  # every process builds the same model and the same batch
    model = nn.Sequential(nn.Linear(16, 64), *(Residual(64) for _ in range(6)), nn.Linear(64, 4))
    x = torch.randn(64, 16)
    labels = (x[:, :4] * x[:, 4:8]).argmax(dim=1)

    pm = partition(model, devices=ranks, mode="pipeline", example_inputs=(x,), n_microbatches=8, schedule="1F1B")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    speaks = os.environ.get("RANK", "0") == "0"
    if speaks:
        where = f"{ranks} processes" if "RANK" in os.environ else f"{ranks} ranks in one process"
        print(pm, f"\n{where}\n\n  step          loss", sep="\n")
    for step in range(1, options.steps + 1):
        loss = pm.train_step(x, target=labels, loss_fn=nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        if speaks and (step == 1 or step % 5 == 0):
            print(f"{step:6d}{loss.item():14.6f}", flush=True)
    weights = pm.full_state_dict()  # a collective: every rank takes part
    if speaks:
        print(f"\n{len(weights)} weights gathered under their original names")


if __name__ == "__main__":
    main()
