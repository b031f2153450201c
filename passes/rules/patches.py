"""Windows of an image side by side, and put together again: ``unfold`` and ``fold``, whose places are height times width in one dimension.

    im2col    batch channels height~ width~              -> batch (channels patch!) (height width)
    col2im    batch (channels patch!) (height~ width!)   -> batch channels height width!

Height is the outer one of the places: rows of them are runs. A row of the image is put together from all rows of places whose windows hold
it; what stands beside each other in a row comes along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy

from passes.rules.bind import MisfitError
from passes.rules.call import Call
from passes.rules.loops import Factor, LocalCall, Loops
from passes.rules.spatial import scattered, sliding
from passes.rules.windows import Window

__all__ = ["fold", "unfold"]

_NAMES = ("kernel_size", "dilation", "padding", "stride")


def unfold(call: Call) -> Loops:
    """``im2col``: a part of the places is made of the rows that their windows reach."""
    *batch, channels, height, width = call.operand("self").shape
    kernel, dilation, padding, stride = _numbers(call)
    if not isinstance(height, int) or not isinstance(width, int):
        raise MisfitError("the size of space depends on the batch")
    sizes, rank = (height, width), len(batch) + 3
    steps = _places(sizes, kernel, dilation, padding, stride)
    factors = [*(Factor("batch", size) for size in batch), Factor("channels", channels)]
    first = len(factors)
    factors += [Factor("patch", kernel[0] * kernel[1], "whole"), Factor("height", steps[0]), Factor("width", steps[1])]
    windows = tuple(
        Window(
            0,
            rank - 2 + index,
            first + 1 + index,
            sliding(sizes[index], stride[index], padding[index], dilation[index] * (kernel[index] - 1)),
        )
        for index in range(2)
    )

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
    kernel, dilation, padding, stride = _numbers(call)
    sizes = tuple(call["output_size"])
    steps = _places(sizes, kernel, dilation, padding, stride)
    channels = call.results[0][-3]
    factors = [*(Factor("batch", size) for size in batch), Factor("channels", channels)]
    first = len(factors)
    factors += [Factor("patch", kernel[0] * kernel[1], "whole"), Factor("height", sizes[0]), Factor("width", sizes[1], "whole")]
    extent = dilation[0] * (kernel[0] - 1)
    rows = scattered(steps[0], stride[0], padding[0], extent)
    reach = replace(rows, first=rows.first * steps[1], last=rows.last * steps[1] + steps[1] - 1, size=steps[0] * steps[1])
    if places != reach.size:
        raise MisfitError("the number of places depends on the batch")

    def localize(part: LocalCall) -> Mapping[str, Any]:
        """On what is read, all that it makes; what others make is cut off."""
        if first + 1 not in part.cut:
            return {}
        read = sympy.Integer(part.operands[0][-1]) / steps[1]
        return {"output_size": [int(stride[0] * (read - 1) + extent + 1), sizes[1]], "padding": [0, padding[1]]}

    outer = tuple((index,) for index in range(len(batch)))
    return Loops(
        factors=tuple(factors),
        operands=((*outer, (first - 1, first), ()),),
        results=((*outer, (first - 1,), (first + 1,), (first + 2,)),),
        linear=(frozenset({0}),),
        windows=(Window(0, len(batch) + 1, first + 1, reach),),
        localize=localize,
    )


def _numbers(call: Call) -> list[list[int]]:
    found = []
    for name in _NAMES:
        value = list(call[name])
        if not all(isinstance(number, int) for number in value):
            raise MisfitError("a window's size depends on the batch")
        found.append(value * 2 if len(value) == 1 else value)
    return found


def _places(
    sizes: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> tuple[int, ...]:
    """How many windows stand along each dimension."""
    every = zip(sizes, kernel, dilation, padding, stride, strict=True)
    return tuple((size + 2 * before - step * (width - 1) - 1) // apart + 1 for size, width, step, before, apart in every)
