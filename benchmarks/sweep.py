"""How long a sweep of some 200 placements takes: a GPT and a U-Net on 2 to 64 simulated devices of three kinds.

    python -m benchmarks.sweep [--samples N] [--html sweep.html]

Prints seconds of the clock and of the processors: on a machine that does other things too, the second are those to compare.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.transformer import gpt
from partitioner.experiments import sweep, write_report

LAYERS, WIDTH, LENGTH, BATCH = 4, 768, 256, 64
CHANNELS, PIXELS = 64, 128


class UNet(nn.Module):
    """Two levels down, two up, with a skip over each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = level(1, channels), level(channels, 2 * channels)
        self.bottom = level(2 * channels, 4 * channels)
        self.grow_second = nn.ConvTranspose2d(4 * channels, 2 * channels, kernel_size=2, stride=2)
        self.grow_first = nn.ConvTranspose2d(2 * channels, channels, kernel_size=2, stride=2)
        self.up_second, self.up_first = level(4 * channels, 2 * channels), level(2 * channels, channels)
        self.head = nn.Conv2d(channels, 1, kernel_size=1)

    def forward(self, image: Tensor) -> Tensor:
        """Map images to images."""
        first = self.first(image)
        second = self.second(nn.functional.avg_pool2d(first, 2))
        bottom = self.bottom(nn.functional.avg_pool2d(second, 2))
        x = self.up_second(torch.cat((second, self.grow_second(bottom)), dim=1))
        result: Tensor = image + self.head(self.up_first(torch.cat((first, self.grow_first(x)), dim=1)))
        return result


def level(inside: int, outside: int) -> nn.Sequential:
    """Convolution, normalisation, activation."""
    return nn.Sequential(nn.Conv2d(inside, outside, kernel_size=3, padding=1), nn.GroupNorm(8, outside), nn.SiLU())


def make_gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device("meta"):
        return gpt(LAYERS, WIDTH), (torch.zeros(BATCH, LENGTH, dtype=torch.long),)


def make_unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device("meta"):
        return UNet(CHANNELS), (torch.zeros(BATCH, 1, PIXELS, PIXELS),)


def processor_seconds() -> float:
    """Return processor seconds of this process and of ended workers."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--samples", type=int, help="so many placements by chance (default: all)")
    arguments.add_argument("--html", help="write the report")
    given = arguments.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = sweep(
            models={"gpt": make_gpt, "unet": make_unet},
            devices=[2, 4, 8, 16, 32, 64],
            modes=["data", "pipeline", "fsdp", "tensor", {"pipeline": 2, "data": -1}, {"data": -1, "tensor": 2}],
            clusters=["h100:8x8", "a100-80gb:8x8", "v100:8x8"],
            store=Path(folder) / "runs.db",
            n_samples=given.samples,
        )
    print(results)
    print(f"{time.perf_counter() - started:.0f} s by the clock, {processor_seconds():.0f} s of processors")
    if given.html is not None:
        write_report(results, given.html, "A GPT and a U-Net")


if __name__ == "__main__":
    main()
