"""A U-Net in tiles on four devices: its large levels are cut in space, its deep ones by the batch. At which depth, the planner finds.

    python examples/unet_space_then_batch.py
    python examples/unet_space_then_batch.py --plan-only     # of four L4s, in seconds, on a laptop

Five images do not divide over four devices; tiles of them do. But deep in the network a tile is a few rows, and messages take longer than
what they save. So tiles end at some depth, parts of them are exchanged for images in an all_to_all (two for one device, one for each of the
others: deep levels are little work), and on the way up tiles begin again. That takes a tenth less time than tiles throughout.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import Constraints, partition

IMAGES, DEVICES, HARDWARE = 5, 4, "l4:1x4"


def level(channels_in: int, channels: int) -> nn.Sequential:
    first, second = (nn.Conv2d(each, channels, 3, padding=1) for each in (channels_in, channels))
    return nn.Sequential(first, nn.GroupNorm(4, channels), nn.SiLU(), second, nn.GroupNorm(4, channels), nn.SiLU())


class UNet(nn.Module):
    """Images of shape (batch, 1, size, size) to images of the same shape, over five levels."""

    def __init__(self, widths: Sequence[int] = (8, 16, 32, 64, 128)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(level(before, width) for before, width in zip((1, *widths), widths[:-1], strict=False))
        self.bottom = level(*widths[-2:])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(inner, outer, 2, 2) for outer, inner in reversed(pairs))
        self.up = nn.ModuleList(level(2 * outer, outer) for outer, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return the images without their noise."""
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--plan-only", action="store_true", help="plan a model that has no memory, and run nothing")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    with torch.device("meta" if options.plan_only else "cpu"):
        whole, images = UNet(), torch.randn(IMAGES, 1, options.size, options.size)
    freed = Constraints(axes={"batch": "tile"})  # the batch may stand in for space where that is cheaper
    pm = partition(copy.deepcopy(whole), DEVICES, {"tile": (4, 1)}, example_inputs=(images,), cluster=HARDWARE, constraints=freed)
    space = partition(copy.deepcopy(whole), DEVICES, {"tile": (4, 1)}, example_inputs=(images,), cluster=HARDWARE)
    alone = partition(copy.deepcopy(whole), 1, "model", example_inputs=(images,), cluster=HARDWARE)
    text = pm.explain()
    print(text[text.index("REGIONS") :].partition("\n\n")[0])
    print("\npredicted for a step         time      memory of the fullest device")
    for words, other in (("one device", alone), ("space alone", space), ("space, then batch", pm)):
        print(f"  {words:24s}{other.plan.step_time * 1e3:6.2f} ms  {max(other.plan.memory) / 2**20:6.1f} MiB")
    if options.plan_only:
        return

    target = torch.zeros_like(images)
    expected = nn.functional.mse_loss(whole(images), target)
    expected.backward()
    loss = pm.train_step(images, target=target, loss_fn=nn.functional.mse_loss)
    gradients = pm.full_gradients()
    differences = [abs(loss.item() - expected.item())]
    for name, parameter in whole.named_parameters():
        found, exact = gradients[name], parameter.grad
        assert found is not None
        assert exact is not None
        differences.append((found - exact).abs().max().item())
    print(f"\nlargest difference {max(differences):.1e} of loss and gradients from those of the whole model")


if __name__ == "__main__":
    main()
