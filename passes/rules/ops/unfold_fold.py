"""Windows of an image side by side, and put together again: ``unfold`` and ``fold``, whose places are height times width in one dimension.

    im2col    batch channels height~ width~              -> batch (channels patch!) (height width)
    col2im    batch (channels patch!) (height~ width~)   -> batch channels height width

A row of the image is put together from all rows of places whose windows hold it, a column likewise: each window slides over one of the two
factors in the dimension of places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from passes.rules.bind import MisfitError
from passes.rules.call import Call
from passes.rules.loops import Factor, LocalCall, Loops
from passes.rules.ops.conv_pool import scattered, sliding, spread
from passes.rules.window import Window

__all__ = ["fold", "unfold"]

_NAMES = ("kernel_size", "dilation", "padding", "stride")


def unfold(call: Call) -> Loops:
    """``im2col``: a part of the places is made of the rows that their windows reach."""
    *batch, channels, height, width = call.operand("self").shape
    kernel, dilation, padding, stride = (spread(call[name], 2) for name in _NAMES)
    if not isinstance(height, int) or not isinstance(width, int):
        raise MisfitError("the size of space depends on the batch")
    sizes, rank = (height, width), len(batch) + 3
    steps = _places(sizes, kernel, dilation, padding, stride)
    factors = [*(Factor("batch", size) for size in batch), Factor("channels", channels)]
    first = len(factors)
    factors += [Factor("patch", kernel[0] * kernel[1], "whole"), Factor("height", steps[0]), Factor("width", steps[1])]
    reaches = [sliding(sizes[index], stride[index], padding[index], dilation[index] * (kernel[index] - 1)) for index in range(2)]
    windows = tuple(Window(0, rank - 2 + index, first + 1 + index, reach) for index, reach in enumerate(reaches))

    def localize(part: LocalCall) -> Mapping[str, Any]:
        return {"padding": [0 if first + 1 + index in part.cut else padding[index] for index in range(2)]}

    outer = tuple((index,) for index in range(len(batch)))
    return Loops(
        factors=tuple(factors),
        operands=((*outer, (first - 1,), (), ()),),
        results=((*outer, (first - 1, first), (first + 1, first + 2)),),
        linear=(frozenset({0}),),
        windows=windows,
        localize=localize,
    )


def fold(call: Call) -> Loops:
    """``col2im``: rows of the image are put together from rows of places."""
    *batch, _, places = call.operand("self").shape
    kernel, dilation, padding, stride = (spread(call[name], 2) for name in _NAMES)
    sizes = tuple(call["output_size"])
    steps = _places(sizes, kernel, dilation, padding, stride)
    if places != steps[0] * steps[1]:
        raise MisfitError("the number of places depends on the batch")
    factors = [*(Factor("batch", size) for size in batch), Factor("channels", call.results[0][-3])]
    first = len(factors)
    height, width, rows, columns = range(first + 1, first + 5)
    factors += [Factor("patch", kernel[0] * kernel[1], "whole"), Factor("height", sizes[0]), Factor("width", sizes[1])]
    factors += [Factor("height_places", steps[0], "whole"), Factor("width_places", steps[1], "whole")]
    extents = [dilation[index] * (kernel[index] - 1) for index in range(2)]
    reaches = [scattered(steps[index], stride[index], padding[index], extents[index]) for index in range(2)]

    def localize(part: LocalCall) -> Mapping[str, Any]:
        """On what is read, all that it makes; what others make is cut off."""
        made, left = list(sizes), list(padding)
        for index, (factor, read) in enumerate(((height, rows), (width, columns))):
            if factor in part.cut:
                made[index] = stride[index] * (int(part.factors[read]) - 1) + extents[index] + 1
                left[index] = 0
        return {"output_size": made, "padding": left}

    outer = tuple((index,) for index in range(len(batch)))
    dimension = len(batch) + 1
    return Loops(
        factors=tuple(factors),
        operands=((*outer, (first - 1, first), (rows, columns)),),
        results=((*outer, (first - 1,), (height,), (width,)),),
        linear=(frozenset({0}),),
        windows=(Window(0, dimension, height, reaches[0], rows), Window(0, dimension, width, reaches[1], columns)),
        localize=localize,
    )


def _places(
    sizes: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> tuple[int, ...]:
    """How many windows stand along each dimension."""
    every = zip(sizes, kernel, dilation, padding, stride, strict=True)
    return tuple((size + 2 * before - step * (width - 1) - 1) // apart + 1 for size, width, step, before, apart in every)
