"""Muon on sharded matrices: each is updated whole by the rank that owns it; vectors by AdamW, on every rank its shard.

    python examples/muon_by_owners.py                                                  # both ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/muon_by_owners.py                # a process a rank

    rank 0   half of gradient and value ──> rank 1   Muon updates the whole matrix
    rank 0   half of the new value      <── rank 1

It prints which rank owns how much, and the bytes of a step, before the first step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import nn

from partitioner import OwnerOptimizer, partition


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="fsdp", help="fsdp, tensor, pipeline, ...")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    # In float64, since Muon rounds gradients to bfloat16: sums in another order could round to other numbers.
    x, target = torch.randn(32, 16, dtype=torch.float64), torch.randint(4, (32,))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).double()
    pm = partition(model, int(os.environ.get("WORLD_SIZE", "2")), options.mode, example_inputs=(x,))

    muon = OwnerOptimizer([p for p in pm.parameters() if p.dim() == 2], torch.optim.Muon, lr=0.02)
    adamw = torch.optim.AdamW([p for p in pm.parameters() if p.dim() != 2], lr=1e-3)
    theirs = [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-3),
    ]
    if int(os.environ.get("RANK", "0")) == 0:
        print(muon.plan_of_processes)
    for step in range(options.steps):
        expected = nn.functional.cross_entropy(model(x), target)
        expected.backward()
        loss = pm.train_step(x, target=target, loss_fn=nn.functional.cross_entropy)
        for optimizer in (muon, adamw, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{step:4}  {float(loss):.6f}")

    weights = pm.full_state_dict()
    difference = max(float((weights[name] - value).abs().max()) for name, value in model.state_dict().items())
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
