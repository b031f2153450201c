"""Train replicas that are each a pipeline: data parallel over two, and in each the layers over two devices.

    python examples/replicas_of_pipelines.py
    python examples/replicas_of_pipelines.py --data 4 --pipeline 2 --tensor 2 --schedule ZB1P

    rank 0  layers 0-2 ─> rank 1  layers 3-5          rows 0 to 15
       ║ gradients            ║ gradients
    rank 2  layers 0-2 ─> rank 3  layers 3-5          rows 16 to 31

The mesh names its dimensions, outermost first. Both replicas run one schedule, and sum their gradients at its end.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import partition


class Residual(nn.Module):
    """Adds what a small network computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + change


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("data", 2), ("pipeline", 2), ("tensor", 1), ("steps", 30), ("microbatches", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", default="1F1B")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    whole = nn.Sequential(*(Residual(32) for _ in range(6)), nn.Linear(32, 4))
    mesh = {"data": options.data, "pipeline": options.pipeline, "tensor": options.tensor}
    rows = torch.randn(options.steps, 32, 32)
    targets = rows[..., :4].sin() * rows[..., 4:8]
    pm = partition(
        copy.deepcopy(whole), options.data * options.pipeline * options.tensor, mesh,
        example_inputs=(rows[0],), n_microbatches=options.microbatches, schedule=options.schedule,
    )  # fmt: skip
    print(f"{pm}\n\n{pm.explain()}\n")

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (whole, pm)]
    print("  step    one piece    partitioned    difference")
    largest = 0.0
    for step, (x, target) in enumerate(zip(rows, targets, strict=True), start=1):
        expected = nn.functional.mse_loss(whole(x), target)
        expected.backward()
        loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        difference = abs(loss.item() - expected.item())
        largest = max(largest, difference)
        if step == 1 or step % 5 == 0:
            print(f"{step:6d}{expected.item():13.6f}{loss.item():15.6f}{difference:14.1e}")
    print(f"\nlargest difference {largest:.1e} after {options.steps} steps")


if __name__ == "__main__":
    main()
