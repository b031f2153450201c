"""Convolution networks: the two-block one with batch normalisation, and one whose normalisation stays inside a row."""

from __future__ import annotations

from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, classes, real


def _block(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]


def two_blocks() -> nn.Module:
    """Convolution, batch normalisation, ReLU and pooling, twice, and a classifier."""
    return nn.Sequential(*_block(3, 6), *_block(6, 10), nn.Flatten(), nn.Linear(10 * 3 * 3, 5))


def group_normalised() -> nn.Module:
    """Four convolutions with group normalisation and strides, and a classifier."""
    layers: list[nn.Module] = []
    for channels_in, channels_out, stride in ((3, 4, 1), (4, 6, 2), (6, 6, 1), (6, 10, 2)):
        layers.append(nn.Conv2d(channels_in, channels_out, kernel_size=3, stride=stride, padding=1, bias=False))
        layers += [nn.GroupNorm(2, channels_out), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 5))


def _images(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, 3, 12, 12),), {}


def _labels(generator: Generator, batch_size: int) -> Tensor:
    return classes(generator, 5, batch_size)


CASES = (
    Case("batch_norm_convolution", two_blocks, _images, _labels, nn.functional.cross_entropy, batch_norm=True),
    Case("group_norm_convolution", group_normalised, _images, _labels, nn.functional.cross_entropy),
)
