"""Decode an image on one device in a fraction of the memory: sequential tiles, exactly, beside the tiles of diffusers, which are blended.

    python examples/streamed_decoder.py --tiles 36 --memory 0.125

The decoder is diffusers' `AutoencoderKL` with small random weights. Its normalisations run over the whole image, so tiles that are decoded
each by itself, as diffusers does, are other images: they are blended where they meet, and wrong. Here every normalisation gathers its
statistics from all tiles first, and windows read what they reach of the neighbours.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cost_models.hardware.units import format_bytes
from cost_models.memory.liveness import forward_peak
from partitioner import partition
from partitioner.tracing.trace import trace


class Decoder(nn.Module):
    """Latents to an image, eight times as high and wide."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: Tensor) -> Tensor:
        (image,) = self.autoencoder.decode(latents, return_dict=False)  # type: ignore[operator]
        return torch.as_tensor(image)


def build() -> Decoder:
    from diffusers import AutoencoderKL  # noqa: PLC0415  an optional package

    channels = (16, 32, 64, 64)
    autoencoder = AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=128,
    )
    return Decoder(autoencoder).eval()


def error(found: Tensor, expected: Tensor) -> str:
    return f"{float((found - expected).abs().max() / expected.abs().max()):9.1e}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiles", type=int, default=36, help="sequential tiles (default 36)")
    parser.add_argument(
        "--memory", type=float, default=0.125, help="part of the memory of the whole decoder that is allowed (default an eighth)"
    )
    parser.add_argument("--size", type=int, default=64, help="height and width of the latents (default 64)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    decoder, latents = build(), torch.randn(1, 4, options.size, options.size)
    whole = forward_peak(trace(decoder, (latents,), None, False))
    limit = int(options.memory * whole)
    pm = partition(decoder, devices=1, mode={"tile": options.tiles}, example_inputs=(latents,), memory_limit=limit)
    with torch.no_grad():
        expected, found = decoder(latents), pm(latents)
        decoder.autoencoder.enable_tiling()  # type: ignore[operator]
        blended = decoder(latents)
    print("decoder               memory  largest error")
    print(f"whole             {format_bytes(whole):>10}")
    print(f"sequential tiles  {format_bytes(pm.plan.memory[0]):>10}      {error(found, expected)}")
    print(f"diffusers' tiles                  {error(blended, expected)}")
    print()
    print(pm.plan.notes[-1])
    print(f"largest difference {float((found - expected).abs().max()):.1e}")


if __name__ == "__main__":
    main()
