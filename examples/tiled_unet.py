"""Train a U-Net on images in four tiles: every layer computes a quarter of its images on each device, height and width cut once.

    python examples/tiled_unet.py

It learns to remove noise from stripes; down by pooling, up by transposed convolutions. The list shows what is fetched before each run
of layers: `"0:18|14:32"` says that the upper tiles read rows 0 to 17, the lower ones rows 14 to 31: two rows of the neighbour, with which a
tile computes the row that the second of two layers reads of it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import partition
from passes.ir.comm.primitives import halo_exchange

SIZE = 32


def level(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.SiLU())


class UNet(nn.Module):
    """Images of shape (batch, 1, 32, 32) to images of the same shape, over three levels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList((level(1, width), level(width, 2 * width)))
        self.bottom = level(2 * width, 4 * width)
        self.grow = nn.ModuleList((nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.ConvTranspose2d(2 * width, width, 4, 2, 1)))
        self.up = nn.ModuleList((level(4 * width, 2 * width), level(2 * width, width)))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = image, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, up, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = up(torch.cat((skip, grow(x)), dim=1))
        noise: Tensor = self.head(x)
        return image - noise


def stripes(rows: int) -> tuple[Tensor, Tensor]:
    """Noisy and clean images of horizontal stripes."""
    clean = torch.sin(torch.arange(SIZE) * 0.8 + 6.3 * torch.rand(rows, 1)).view(rows, 1, SIZE, 1).expand(-1, -1, -1, SIZE)
    return clean + 0.5 * torch.randn(rows, 1, SIZE, SIZE), clean.contiguous()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    whole = UNet()
    noisy, clean = stripes(8)
    pm = partition(copy.deepcopy(whole), options.devices, "tile", example_inputs=(noisy,))
    print(f"{pm}\n\nFetched by rank 0 in a forward, for a batch of {len(noisy)}:")
    for node in pm.graph(0).graph.nodes:
        if node.target is halo_exchange:
            print(f"  {node.meta['bytes']:6d} bytes sent   dim {node.args[1][0]}   {node.kwargs['wanted'][0]}")

    loss_fn = nn.MSELoss()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (whole, pm)]
    print("\n  step     one piece          tiles")
    for step in range(1, options.steps + 1):
        expected = loss_fn(whole(noisy), clean)
        expected.backward()
        loss = pm.train_step(noisy, target=clean, loss_fn=loss_fn)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1 or step % 5 == 0:
            print(f"{step:6d}{expected.item():14.6f}{loss.item():15.6f}")

    with torch.no_grad():
        largest = (pm(noisy) - whole(noisy)).abs().max().item()
    print(f"\nlargest difference {largest:.1e} over the images that both give after {options.steps} steps")


if __name__ == "__main__":
    main()
