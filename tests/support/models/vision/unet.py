"""A U-Net: every level's value skips over all the stages below it."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, mean_squared_error, real


def _level(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1), nn.GroupNorm(2, channels_out), nn.SiLU())


class UNet(nn.Module):
    """Images of shape (batch, 1, 12, 12) to images of the same shape."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList((_level(1, width), _level(width, 2 * width)))
        self.bottom = _level(2 * width, 4 * width)
        self.grow = nn.ModuleList(
            (
                nn.ConvTranspose2d(4 * width, 2 * width, kernel_size=2, stride=2),
                nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2),
            ),
        )
        self.up = nn.ModuleList((_level(4 * width, 2 * width), _level(2 * width, width)))
        self.head = nn.Conv2d(width, 1, kernel_size=1)

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        x = image
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.bottom(x)
        for grow, level, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = level(torch.cat((skip, grow(x)), dim=1))
        return image + self.head(x)


def _images(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, 1, 12, 12),), {}


def _target(generator: Generator, batch_size: int) -> Tensor:
    return real(generator, batch_size, 1, 12, 12)


CASES = (Case("unet", UNet, _images, _target, mean_squared_error),)
