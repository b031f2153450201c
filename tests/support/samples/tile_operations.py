"""Operations whose windows tiles cut, each drawn at random: sizes, kernels, strides, dilations, paddings."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.running.tiles import Tiled

DTYPE = torch.float64
CHANNELS = 2


@dataclass
class Draw:
    """Random sizes for one call.

    Attributes:
        rng: draws them.
        rank: dimensions of space.
    """

    rng: random.Random
    rank: int

    def each(self, low: int, high: int) -> list[int]:
        """Return a number for each dimension of space."""
        return [self.rng.randint(low, high) for _ in range(self.rank)]

    def flag(self) -> bool:
        return self.rng.random() < 0.5

    def of_rank(self, **functions: Any) -> Any:
        """Return the function for so many dimensions: ``one``, ``two`` or ``three``."""
        return functions[("one", "two", "three")[self.rank - 1]]

    def real(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=DTYPE)


def resampled(function: Callable[[Tensor], Tensor]) -> Tiled:
    """After a convolution of single elements: it tells which dimensions are space, and has a parameter."""

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        mix = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
        return function(mix(x, weight.view(CHANNELS, CHANNELS, *[1] * (x.dim() - 2))))

    return Tiled(whole, weight=torch.randn(CHANNELS, CHANNELS, dtype=DTYPE))


def convolution(draw: Draw) -> Tiled:
    function = draw.of_rank(one=F.conv1d, two=F.conv2d, three=F.conv3d)
    kernel, stride, dilation, groups = draw.each(1, 4), draw.each(1, 3), draw.each(1, 2), draw.rng.choice([1, 2])
    padding: Any = [draw.rng.randint(0, step * (size - 1)) for size, step in zip(kernel, dilation, strict=True)]
    if draw.rng.random() < 0.2:
        padding, stride = "same", [1] * draw.rank
    return Tiled(
        lambda x, weight, bias: function(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups),
        weight=draw.real(4, CHANNELS // groups, *kernel),
        bias=draw.real(4),
    )


def padded_convolution(draw: Draw) -> torch.nn.Module:
    """Return every ``padding_mode`` of the modules."""
    kind: Any = draw.of_rank(one=torch.nn.Conv1d, two=torch.nn.Conv2d, three=torch.nn.Conv3d)
    mode = draw.rng.choice(["zeros", "reflect", "replicate", "circular"])
    found: torch.nn.Module = kind(CHANNELS, 3, draw.each(2, 3), draw.each(1, 2), draw.each(0, 2), draw.each(1, 2), padding_mode=mode)
    return found.to(DTYPE)


def transposed_convolution(draw: Draw) -> Tiled:
    function = draw.of_rank(one=F.conv_transpose1d, two=F.conv_transpose2d, three=F.conv_transpose3d)
    kernel, stride, dilation, groups = draw.each(1, 4), draw.each(1, 3), draw.each(1, 2), draw.rng.choice([1, 2])
    padding = [draw.rng.randint(0, step * (size - 1)) for size, step in zip(kernel, dilation, strict=True)]
    more = [draw.rng.randint(0, max(each) - 1) for each in zip(stride, dilation, strict=True)]
    return Tiled(
        lambda x, weight, bias: function(
            x, weight, bias, stride=stride, padding=padding, output_padding=more, groups=groups, dilation=dilation
        ),
        weight=draw.real(CHANNELS, 4, *kernel),
        bias=draw.real(4 * groups),
    )


def max_pool(draw: Draw) -> Tiled:
    function = draw.of_rank(one=F.max_pool1d, two=F.max_pool2d, three=F.max_pool3d)
    kernel, stride, dilation, ceil = draw.each(1, 3), draw.each(1, 3), draw.each(1, 2), draw.flag()
    padding = [draw.rng.randint(0, size // 2) for size in kernel]
    return resampled(lambda x: function(x, kernel, stride, padding, dilation, ceil))


def average_pool(draw: Draw) -> Tiled:
    function = draw.of_rank(one=F.avg_pool1d, two=F.avg_pool2d, three=F.avg_pool3d)
    kernel, stride, ceil, counts = draw.each(1, 3), draw.each(1, 3), draw.flag(), draw.flag()
    padding = [draw.rng.randint(0, size // 2) for size in kernel]
    return resampled(lambda x: function(x, kernel, stride, padding, ceil, counts))


def adaptive_pool(draw: Draw) -> Tiled:
    average = draw.of_rank(one=F.adaptive_avg_pool1d, two=F.adaptive_avg_pool2d, three=F.adaptive_avg_pool3d)
    maximum = draw.of_rank(one=F.adaptive_max_pool1d, two=F.adaptive_max_pool2d, three=F.adaptive_max_pool3d)
    size, function = draw.each(1, 7), draw.rng.choice([average, average, maximum])
    return resampled(lambda x: function(x, size))


def interpolation(draw: Draw) -> Tiled:
    linear = draw.of_rank(one=["linear"], two=["bilinear", "bicubic"], three=["trilinear"])
    mode = draw.rng.choice(["nearest", "nearest-exact", *linear * 2])
    corners = draw.flag() if mode in linear else None
    how: Mapping[str, Any] = {"scale_factor": draw.rng.choice([2, 3, 1.5, 0.5, 0.7, 2.3])} if draw.flag() else {"size": draw.each(3, 25)}
    return resampled(lambda x: F.interpolate(x, mode=mode, align_corners=corners, **how))


def pad(draw: Draw) -> Tiled:
    mode = draw.rng.choice(["constant", "reflect", "replicate", "circular"])
    amounts = [draw.rng.randint(-1 if mode == "constant" else 0, 3) for _ in range(2 * draw.rank)]
    return resampled(lambda x: F.pad(x, amounts, mode=mode, value=1.5 if mode == "constant" else None))


def crop(draw: Draw) -> Tiled:
    pieces: tuple[Any, ...] = (
        ...,
        *(slice(draw.rng.randint(0, 2), -draw.rng.randint(1, 2), draw.rng.randint(1, 2)) for _ in range(draw.rank)),
    )
    return resampled(lambda x: x[pieces] * 2)


def roll(draw: Draw) -> Tiled:
    shifts, dims = draw.each(-3, 3), tuple(range(2, 2 + draw.rank))
    return resampled(lambda x: torch.roll(x, shifts, dims))


def flip(draw: Draw) -> Tiled:
    dims = draw.rng.sample(range(2, 2 + draw.rank), draw.rng.randint(1, draw.rank))
    return resampled(lambda x: x.flip(dims))


def sliding_view(draw: Draw) -> Tiled:
    """Call ``Tensor.unfold`` on every dimension of space."""
    sizes, steps = draw.each(1, 3), draw.each(1, 2)

    def windows(x: Tensor) -> Tensor:
        for dim, (size, step) in enumerate(zip(sizes, steps, strict=True), start=2):
            x = x.unfold(dim, size, step)
        return x.sum(tuple(range(-draw.rank, 0)))

    return resampled(windows)


def pixel_shuffle(draw: Draw) -> Tiled:
    factor = draw.rng.choice([2, 3])
    return Tiled(
        lambda x, weight, after: F.conv2d(F.pixel_shuffle(F.conv2d(x, weight, padding=1), factor), after, padding=1),
        weight=draw.real(factor**2, CHANNELS, 3, 3),
        after=draw.real(1, 1, 3, 3),
    )


def pixel_unshuffle(draw: Draw) -> Tiled:
    """Unshuffle a convolution's result, whose sizes are multiples of two."""
    return Tiled(
        lambda x, weight: F.pixel_unshuffle(F.interpolate(F.conv2d(x, weight, padding=1), scale_factor=2), 2),
        weight=draw.real(3, CHANNELS, 3, 3),
    )


def patches(draw: Draw) -> Tiled:
    """Call ``unfold`` and ``fold``, with rows of places between them."""
    kernel, dilation, padding, stride = (tuple(draw.each(low, high)) for low, high in ((1, 3), (1, 2), (0, 1), (1, 2)))
    return Tiled(
        lambda x, weight: F.fold(
            F.unfold(F.conv2d(x, weight, padding=1), kernel, dilation, padding, stride), x.shape[2:], kernel, dilation, padding, stride
        ),
        weight=draw.real(3, CHANNELS, 3, 3),
    )


def normalisation(draw: Draw) -> Tiled:
    """Compute statistics over space, between windows."""
    pool = draw.of_rank(one=F.avg_pool1d, two=F.avg_pool2d, three=F.avg_pool3d)
    kind = draw.rng.choice(["instance", "group", "batch", "layer"])

    def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = pool(x, 2, 1)
        if kind == "instance":
            return F.instance_norm(x, weight=weight, bias=bias)
        if kind == "group":
            return F.group_norm(x, 2, weight, bias)
        if kind == "batch":
            return F.batch_norm(x, None, None, weight, bias, training=True)
        return F.layer_norm(x.transpose(1, -1), [CHANNELS], weight, bias).transpose(1, -1)

    return Tiled(normalised, weight=draw.real(CHANNELS), bias=draw.real(CHANNELS))


OPERATIONS: Mapping[str, tuple[Callable[[Draw], torch.nn.Module], tuple[int, ...]]] = {
    "convolution": (convolution, (1, 2, 3)),
    "padded_convolution": (padded_convolution, (1, 2, 3)),
    "transposed_convolution": (transposed_convolution, (1, 2, 3)),
    "max_pool": (max_pool, (1, 2, 3)),
    "average_pool": (average_pool, (1, 2, 3)),
    "adaptive_pool": (adaptive_pool, (1, 2, 3)),
    "interpolation": (interpolation, (1, 2, 3)),
    "pad": (pad, (1, 2, 3)),
    "crop": (crop, (1, 2, 3)),
    "roll": (roll, (1, 2, 3)),
    "flip": (flip, (1, 2, 3)),
    "sliding_view": (sliding_view, (1, 2)),
    "pixel_shuffle": (pixel_shuffle, (2,)),
    "pixel_unshuffle": (pixel_unshuffle, (2,)),
    "patches": (patches, (2,)),
    "normalisation": (normalisation, (1, 2, 3)),
}
"""Name -> what draws a module, and for how many dimensions of space there is one."""

GRIDS: Mapping[int, tuple[int | tuple[int, ...], ...]] = {
    1: (2, 3, 4),
    2: (2, 3, 4, (2, 2), (1, 3), (3, 2)),
    3: (2, 4, (2, 2), (1, 2, 2), (2, 2, 2)),
}
"""Dimensions of space -> grids of tiles."""


def drawn(name: str, seed: int) -> tuple[torch.nn.Module, Tensor, int | tuple[int, ...]]:
    """Return a module that its own input fits, and a grid. Equal seeds give equal ones."""
    rng = random.Random(f"{name} {seed}")
    make, ranks = OPERATIONS[name]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for _ in range(100):
            draw = Draw(rng, rng.choice(ranks))
            x, model = draw.real(2, CHANNELS, *draw.each(5, 14)), make(draw)
            try:
                if model(x).numel():
                    return model, x, rng.choice(GRIDS[draw.rank])
            except (RuntimeError, ValueError):
                continue  # the window does not fit the size
    raise AssertionError(f"no call of {name} fits its input")
