"""Pipeline a U-Net: values that skip over stages go straight to where they are used.

    python examples/unet_skips.py

The network learns to remove noise from discs. Its encoder keeps a value for the decoder at every level; the explanation shows each
of them as a message of its own, with its bytes and the reason why it is sent.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import partition

SIZE = 32


def level(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.SiLU())


class UNet(nn.Module):
    """Images of shape (batch, 1, 32, 32) to images of the same shape, over three levels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList((level(1, width), level(width, 2 * width)))
        self.bottom = level(2 * width, 4 * width)
        self.up = nn.ModuleList((level(6 * width, 2 * width), level(3 * width, width)))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = image, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(torch.cat((skip, nn.functional.interpolate(x, scale_factor=2.0)), dim=1))
        noise: Tensor = self.head(x)
        return image - noise


def discs(rows: int) -> tuple[Tensor, Tensor]:
    """Noisy and clean images of one disc each."""
    grid = torch.arange(SIZE)
    centre, radius = torch.randint(8, SIZE - 8, (2, rows, 1, 1)), torch.randint(3, 8, (rows, 1, 1))
    clean = ((grid - centre[0]) ** 2 + (grid.unsqueeze(1) - centre[1]) ** 2 <= radius**2).float().unsqueeze(1)
    return clean + 0.5 * torch.randn_like(clean), clean


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    whole = UNet()
    noisy, clean = discs(16)
    pm = partition(copy.deepcopy(whole), options.devices, "pipeline", example_inputs=(noisy,), n_microbatches=4)
    print(pm, pm.explain(), sep="\n\n")

    loss_fn = nn.MSELoss()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (whole, pm)]
    print("\n  step     one piece    partitioned")
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
