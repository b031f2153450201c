"""Segment volumes too large for one device: depth, height and width cut over devices, a block of the volume on each.

    python examples/tiled_volumes.py
    python examples/tiled_volumes.py --grid 2 2 2            # eight blocks

The network finds balls in noise. Each device holds its block and fetches one layer of voxels from its neighbours before each
convolution; the last line of the program's communication says how many bytes that are.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import partition

SIZE = 16


def segmentation() -> nn.Sequential:
    def convolved(channels_in: int, channels: int) -> list[nn.Module]:
        return [nn.Conv3d(channels_in, channels, 3, padding=1), nn.InstanceNorm3d(channels, affine=True), nn.LeakyReLU()]

    up = nn.Upsample(scale_factor=2, mode="trilinear")
    return nn.Sequential(*convolved(1, 4), nn.MaxPool3d(2), *convolved(4, 8), up, *convolved(8, 4), nn.Conv3d(4, 2, 1))


def balls(rows: int) -> tuple[Tensor, Tensor]:
    """Noisy volumes of shape (rows, 1, 16, 16, 16), and for each voxel whether it is in the ball."""
    axis = torch.arange(SIZE)
    z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
    centre, radius = torch.randint(4, SIZE - 4, (3, rows, 1, 1, 1)), torch.randint(3, 6, (rows, 1, 1, 1))
    inside = (z - centre[0]) ** 2 + (y - centre[1]) ** 2 + (x - centre[2]) ** 2 <= radius**2
    return inside.unsqueeze(1) + 0.5 * torch.randn(rows, 1, SIZE, SIZE, SIZE), inside.long()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--grid", type=int, nargs="+", default=[2, 2])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    whole = segmentation()
    volumes, inside = balls(4)
    grid = tuple(options.grid)
    pm = partition(copy.deepcopy(whole), devices=math.prod(grid), mode={"tile": grid}, example_inputs=(volumes,))
    print(pm, pm.explain(), sep="\n\n")

    loss_fn = nn.CrossEntropyLoss()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (whole, pm)]
    print("\n  step     one piece         blocks")
    for step in range(1, options.steps + 1):
        expected = loss_fn(whole(volumes), inside)
        expected.backward()
        loss = pm.train_step(volumes, target=inside, loss_fn=loss_fn)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1 or step % 5 == 0:
            print(f"{step:6d}{expected.item():14.6f}{loss.item():15.6f}")

    with torch.no_grad():
        largest = (pm(volumes) - whole(volumes)).abs().max().item()
    print(f"\nlargest difference {largest:.1e} over the volumes that both give after {options.steps} steps")


if __name__ == "__main__":
    main()
