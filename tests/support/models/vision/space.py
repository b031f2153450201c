"""Models of images and volumes, small: what tiles cut. Built from their configurations; nothing is downloaded."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, classes, mean_squared_error, real

LABELS = 3


class Block(nn.Module):
    """Two convolutions, normalised over the batch or inside a row."""

    def __init__(self, channels_in: int, channels: int, *, batch_norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, padding=1, bias=not batch_norm)  # a bias before it has no gradient
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(channels) if batch_norm else nn.GroupNorm(2, channels)
        self.last_norm = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Keep height and width."""
        return self.last_norm(self.second(self.norm(self.first(x)).relu())).relu()


class UShaped(nn.Module):
    """Down by pooling, up by transposed convolutions; what was on a level before it is beside what comes up to it again.

    Attributes:
        down: of each level, on the way down.
        bottom: of the last level.
        grow: transposed convolutions, the lowest first.
        up: of each level on the way up, the lowest first.
        head: of what comes out.
    """

    down: nn.ModuleList
    bottom: nn.Module
    grow: nn.ModuleList
    up: nn.ModuleList
    head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images of the same size."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, up, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = up(torch.cat((grow(x), skip), 1))
        return self.head(x)


class TransposedUNet(UShaped):
    """Up again by transposed convolutions, one with overlapping windows."""

    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block(*channels, batch_norm=batch_norm) for channels in ((3, 4), (4, 6)))
        self.bottom = Block(6, 6, batch_norm=batch_norm)
        self.grow = nn.ModuleList((nn.ConvTranspose2d(6, 6, 2, 2), nn.ConvTranspose2d(4, 4, 4, 2, 1)))
        self.up = nn.ModuleList(Block(*channels, batch_norm=batch_norm) for channels in ((12, 4), (8, 4)))
        self.head = nn.Conv2d(4, 2, 1)


class Sampled(nn.Module):
    """A diffusers model as a function of one tensor."""

    def __init__(self, inner: nn.Module, *args: Any) -> None:
        super().__init__()
        self.inner, self.args = inner, args

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for the tensor."""
        inner: Any = self.inner
        decoded = inner.decode(x) if hasattr(inner, "decode") else inner(x, *self.args)
        return decoded.sample


def images_of_noise() -> nn.Module:
    """DCGAN's, from one element to 32 x 32 (Radford, Metz, Chintala 2016)."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    for before, channels in ((8, 6), (6, 4)):
        layers += [nn.ConvTranspose2d(before, channels, 4, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(4, 3, 4, 2, 1, bias=False), nn.Tanh())


def segmentation_of_volumes() -> nn.Module:
    """Return a network in three dimensions, with an uneven size."""
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(4, 4, 3, padding=1, bias=False), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(),
        nn.Upsample(scale_factor=2, mode="trilinear"), nn.Conv3d(4, 2, 1),
    )  # fmt: skip


def resnet() -> nn.Module:
    """Return three stages of strided residual blocks."""
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6, 6], depths=[1, 1, 1], layer_type="basic", num_labels=LABELS,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config)


def convnext() -> nn.Module:
    """Depthwise kernels of 7, wider than the tiles of its second stage."""
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 2], num_stages=2, patch_size=4, num_labels=LABELS)
    return transformers.ConvNextForImageClassification(config)


def segformer() -> nn.Module:
    """Attention over space, its keys and values reduced by strided convolutions."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=LABELS, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config)


def unet_of_diffusers() -> nn.Module:
    """Return ``UNet2DModel`` with attention at its lower level, at one time step."""
    from diffusers import UNet2DModel  # noqa: PLC0415  an extra of the tests

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    inner = UNet2DModel(
        sample_size=16, block_out_channels=(4, 8), layers_per_block=1, down_block_types=down, up_block_types=up, norm_num_groups=2,
        attention_head_dim=4,
    )  # fmt: skip
    return Sampled(inner, 3)


def autoencoder_of_diffusers() -> nn.Module:
    """Return the decoder of ``AutoencoderKL``; the encoder gets no gradient."""
    from diffusers import AutoencoderKL  # noqa: PLC0415  an extra of the tests

    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    return Sampled(AutoencoderKL(block_out_channels=(4, 8), down_block_types=down, up_block_types=up, norm_num_groups=2))


def _case(name: str, model: Any, shape: tuple[int, ...], result: tuple[int, ...], **more: Any) -> Case:
    """Return a case whose result is regressed; a ``result`` without dimensions is a class.

    Before a batch normalisation, gradients that are zero in exact arithmetic are what rounding leaves, and AdamW makes steps of them.
    """
    more = {"tolerance": 1e-8, **more} if more.get("batch_norm") else more

    def inputs(draw: Generator, rows: int) -> Inputs:
        return (real(draw, rows, *shape),), {}

    def target(draw: Generator, rows: int) -> Tensor:
        return real(draw, rows, *result) if result else classes(draw, LABELS, rows)

    def loss(output: Any, wanted: Tensor) -> Tensor:
        output = output if isinstance(output, Tensor) else output.logits
        return mean_squared_error(output, wanted) if result else nn.functional.cross_entropy(output, wanted)

    return Case(name, model, inputs, target, loss, **more)


SPACE: tuple[Case, ...] = (
    _case("transposed_unet", lambda: TransposedUNet(batch_norm=True), (3, 20, 12), (2, 20, 12), batch_norm=True),
    _case("transposed_unet_of_groups", lambda: TransposedUNet(batch_norm=False), (3, 20, 12), (2, 20, 12)),
    _case("dcgan_generator", images_of_noise, (6, 1, 1), (3, 32, 32), batch_norm=True),
    _case("segmentation_of_volumes", segmentation_of_volumes, (1, 12, 8, 8), (2, 12, 8, 8), batch_norm=True),
    _case("residual_images", resnet, (3, 48, 48), (), batch_norm=True),
    _case("convnext_images", convnext, (3, 48, 40), ()),
    _case("segformer", segformer, (3, 48, 48), (LABELS, 12, 12), batch_norm=True),
    _case("unet_of_diffusers", unet_of_diffusers, (3, 16, 16), (3, 16, 16)),
    _case("autoencoder_of_diffusers", autoencoder_of_diffusers, (4, 10, 10), (3, 20, 20)),
)
"""Every case."""


def space_case(name: str) -> Case:
    """Return the case of that name; raise KeyError when there is none."""
    return {case.name: case for case in SPACE}[name]
