"""Rules of ``unfold`` (im2col) and ``fold`` (col2im), which have all windows of an image in one dimension, rows times columns.

    im2col    batch channels height~ width~              -> batch (channels patch!) (height width)
    col2im    batch (channels patch!) (height~ width~)   -> batch channels height width

In ``fold``, a row of the image is the sum over all rows of windows that contain it, and a column likewise: each factor of the result slides
over one of the two factors in the dimension of windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from passes.rules.bind import MisfitError
from passes.rules.call import Call
from passes.rules.loops import Factor, LocalCall, Loops
from passes.rules.ops.conv_pool import scattered, sliding, spread
from passes.rules.window import Window

_NAMES = ("kernel_size", "dilation", "padding", "stride")


def unfold(call: Call) -> Loops:
    """Take windows (``im2col``), cut by rows and columns; a part reads the elements in its windows."""
    *batch, channels_size, height_size, width_size = call.operand("self").shape
    kernel, dilation, padding, stride = (spread(call[name], 2) for name in _NAMES)
    if not isinstance(height_size, int) or not isinstance(width_size, int):
        raise MisfitError("the size of space depends on the batch")
    sizes = (height_size, width_size)
    n_windows = _count_windows(sizes, kernel, dilation, padding, stride)
    channels, patch, height, width = range(len(batch), len(batch) + 4)
    factors = [*(Factor("batch", size) for size in batch), Factor("channels", channels_size)]
    factors += [Factor("patch", kernel[0] * kernel[1], "whole"), Factor("height", n_windows[0]), Factor("width", n_windows[1])]
    reaches = [sliding(sizes[index], stride[index], padding[index], dilation[index] * (kernel[index] - 1)) for index in range(2)]
    batch_dims = tuple((index,) for index in range(len(batch)))
    return Loops(
        factors=tuple(factors),
        operands=((*batch_dims, (channels,), (), ()),),
        results=((*batch_dims, (channels, patch), (height, width)),),
        linear=(frozenset({0}),),
        windows=(Window(0, len(batch) + 1, height, reaches[0]), Window(0, len(batch) + 2, width, reaches[1])),
        localize=lambda part: {"padding": [0 if factor in part.cut else padding[index] for index, factor in enumerate((height, width))]},
    )


def fold(call: Call) -> Loops:
    """Add windows to an image (``col2im``), cut by rows and columns; a part reads the windows that contain its elements."""
    *batch, _, all_windows = call.operand("self").shape
    kernel, dilation, padding, stride = (spread(call[name], 2) for name in _NAMES)
    sizes = tuple(call["output_size"])
    n_windows = _count_windows(sizes, kernel, dilation, padding, stride)
    if all_windows != n_windows[0] * n_windows[1]:
        raise MisfitError("the number of places depends on the batch")
    channels, patch, height, width, height_windows, width_windows = range(len(batch), len(batch) + 6)
    factors = [*(Factor("batch", size) for size in batch), Factor("channels", call.results[0][-3])]
    factors += [Factor("patch", kernel[0] * kernel[1], "whole"), Factor("height", sizes[0]), Factor("width", sizes[1])]
    factors += [Factor("height_places", n_windows[0], "whole"), Factor("width_places", n_windows[1], "whole")]
    extents = [dilation[index] * (kernel[index] - 1) for index in range(2)]
    reaches = [scattered(n_windows[index], stride[index], padding[index], extents[index]) for index in range(2)]

    def localize(part: LocalCall) -> Mapping[str, Any]:
        """Fold all windows that are read; surplus results are cut off (``Reach.skip``)."""
        output_size, part_padding = list(sizes), list(padding)
        for index, (factor, windows_read) in enumerate(((height, height_windows), (width, width_windows))):
            if factor in part.cut:
                output_size[index] = stride[index] * (int(part.factors[windows_read]) - 1) + extents[index] + 1
                part_padding[index] = 0
        return {"output_size": output_size, "padding": part_padding}

    batch_dims = tuple((index,) for index in range(len(batch)))
    windows_dim = len(batch) + 1
    return Loops(
        factors=tuple(factors),
        operands=((*batch_dims, (channels, patch), (height_windows, width_windows)),),
        results=((*batch_dims, (channels,), (height,), (width,)),),
        linear=(frozenset({0}),),
        windows=(
            Window(0, windows_dim, height, reaches[0], height_windows),
            Window(0, windows_dim, width, reaches[1], width_windows),
        ),
        localize=localize,
    )


def _count_windows(
    sizes: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> tuple[int, ...]:
    """Return the number of windows along each dimension."""
    dimensions = zip(sizes, kernel, dilation, padding, stride, strict=True)
    return tuple((size + 2 * before - step * (width - 1) - 1) // apart + 1 for size, width, step, before, apart in dimensions)
