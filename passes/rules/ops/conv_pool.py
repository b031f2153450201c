"""Rules of ops with windows: convolution, pooling, interpolation, padding, flip and roll. A part reads the elements in its windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from passes.rules.bind import MisfitError, bind, whole, write
from passes.rules.call import Call
from passes.rules.language import parse
from passes.rules.loops import LocalCall, Loops, Size
from passes.rules.window import STEP, Reach

Localize = Callable[[LocalCall, frozenset[str]], Mapping[str, Any]]
"""Returns the arguments that the call of a part passes instead, given the part and the names of the factors that are cut."""


def space(rank: int) -> tuple[str, ...]:
    """Return the names of the spatial dimensions."""
    return {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}[rank]


def windowed(line: str, call: Call, reaches: Mapping[str, Reach], localize: Localize) -> Loops:
    """Bind a line with windows (``name~``) to a call; ``localize`` adds to the arguments that the line itself localizes."""
    loops = bind(parse(line), call, reaches)
    localize_line = loops.localize

    def localize_all(part: LocalCall) -> Mapping[str, Any]:
        arguments = dict(localize_line(part)) if localize_line is not None else {}
        arguments.update(localize(part, frozenset(loops.factors[factor].name for factor in part.cut)))
        return arguments

    return dataclasses.replace(loops, localize=localize_all)


def spread(value: Any, rank: int) -> tuple[int, ...]:
    """Return an integer for each dimension, from one for all or one for each: ``spread(3, 2)`` is ``(3, 3)``."""
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(number, int) for number in numbers):
        raise MisfitError("a window's size depends on the batch")
    return numbers * rank if len(numbers) == 1 else numbers


def _input_space(call: Call, rank: int) -> tuple[int, ...]:
    """Return the sizes of the spatial dimensions of the input."""
    return _integers(call.operand("input", "self").shape[-rank:])


def _result_space(call: Call, rank: int) -> tuple[int, ...]:
    """Return the sizes of the spatial dimensions of the result."""
    return _integers(call.results[0][-rank:])


def _integers(sizes: Sequence[Size]) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in sizes):
        raise MisfitError("the size of space depends on the batch")
    return tuple(int(size) for size in sizes)


# -- convolution -----------------------------------------------------------------------------------------------------------------------


def convolution(rank: int, *, transposed: bool = False) -> Callable[[Call], Loops]:
    """Return the rule of a convolution over ``rank`` spatial dimensions."""
    return lambda call: _convolution(call, rank, transposed)


def convolution_of_arguments(call: Call) -> Loops:
    """Build the rule as ``conv1d`` to ``conv_transpose3d``, by the rank of the weight and the argument ``transposed``."""
    return _convolution(call, len(call.operand("weight").shape) - 2, bool(call["transposed"]))


def _convolution(call: Call, rank: int, transposed: bool) -> Loops:
    """Return the loops of a convolution: of spatial dimensions (windows), groups of channels, and the kernel, which is not cut."""
    names, sizes = space(rank), _input_space(call, rank)
    kernel = _integers(call.operand("weight").shape[2:])
    strides, dilation = spread(call["stride"], rank), spread(call["dilation"], rank)
    extents = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    padding = (0,) * rank if isinstance(call["padding"], str) else spread(call["padding"], rank)
    reaches = {}
    for name, size, stride, before, extent in zip(names, sizes, strides, padding, extents, strict=True):
        reaches[name] = scattered(size, stride, before, extent) if transposed else sliding(size, stride, before, extent)

    def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        if not cut & set(names) or isinstance(call["padding"], str):
            return {}
        arguments: dict[str, Any] = {"padding": [0 if name in cut else before for name, before in zip(names, padding, strict=True)]}
        if transposed:
            output_padding = spread(call["output_padding"], rank)
            arguments["output_padding"] = [0 if name in cut else more for name, more in zip(names, output_padding, strict=True)]
        return arguments

    # Normalization replaces "same" by numbers, unless both sides are padded differently: then space is not cut.
    before_mark, after_mark = ("!", "'!") if call["padding"] == "same" else ("~", "")
    input_space, output_space = (" ".join(name + mark for name in names) for mark in (before_mark, after_mark))
    weight = "(groups channels_in) channels_out" if transposed else "(groups channels_out) channels_in"
    kernel_term = " ".join(f"kernel_{name}!" for name in names)
    line = (
        f"batch* (groups channels_in) {input_space}, {weight} {kernel_term}, +(groups channels_out)"
        f" -> batch* (groups channels_out) {output_space}; groups = groups; linear input | weight"
    )
    return windowed(line, call, reaches, localize)


def sliding(size: int, stride: int, before: int, extent: int, **options: Any) -> Reach:
    """Return the reads of a window over a dimension that is padded by ``before``; ``extent`` is from its first element to its last."""
    return Reach(stride * STEP - before, stride * STEP - before + extent, size, **options)


def scattered(size: int, stride: int, before: int, extent: int) -> Reach:
    """Return the reads of a transposed convolution, with arguments as in ``sliding``.

    Each element is added to a window of the result, so that a result reads all elements whose windows contain it. In a gap between windows
    it reads the elements on both sides.
    """
    position, step = STEP + before, sympy.Integer(stride)
    first_containing, last_containing = sympy.ceiling((position - extent) / step), sympy.floor(position / step)
    first = sympy.Min(first_containing, last_containing)
    return Reach(first, sympy.Max(first_containing, last_containing), size, skip=position - stride * first)


# -- pooling ---------------------------------------------------------------------------------------------------------------------------


def pool(rank: int, kind: str) -> Callable[[Call], Loops]:
    """Return the rule of the maximum (``kind="max"``) or the average (``"avg"``) of each window."""

    def rule(call: Call) -> Loops:
        names, sizes = space(rank), _input_space(call, rank)
        kernel, padding = spread(call["kernel_size"], rank), spread(call["padding"], rank)
        stride = spread(call["stride"], rank) if call["stride"] else kernel
        dilation = spread(call.get("dilation", 1), rank)
        result_sizes = _result_space(call, rank)
        fill = -math.inf if kind == "max" else 0.0
        reaches = {}
        for index, name in enumerate(names):
            extent = dilation[index] * (kernel[index] - 1)
            reads_padding = padding[index] > 0 or stride[index] * (result_sizes[index] - 1) + extent >= sizes[index]
            divisor_varies = kind == "avg" and reads_padding and not call.get("divisor_override")
            reaches[name] = sliding(sizes[index], stride[index], padding[index], extent, fill=fill, written=divisor_varies)

        def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
            if not cut & set(names):
                return {}
            return {
                "padding": [0 if name in cut else before for name, before in zip(names, padding, strict=True)],
                "ceil_mode": bool(call["ceil_mode"]) and not cut >= set(names),
            }

        return windowed(_resampling_line(names, "; linear self" if kind == "avg" else ""), call, reaches, localize)

    return rule


def adaptive_pool(rank: int) -> Callable[[Call], str | Loops]:
    """Return the rule of the average of as many windows as the result has elements; a single one is the mean over all of space."""

    def rule(call: Call) -> str | Loops:
        names, sizes = space(rank), _input_space(call, rank)
        result_sizes = _result_space(call, rank)
        if all(result_size == 1 for result_size in result_sizes):
            return f"batch* channels {' '.join(f'{name}:mean' for name in names)} -> batch* channels {'1 ' * rank}; linear self"
        reaches = {}
        for name, size, result_size in zip(names, sizes, result_sizes, strict=True):
            ratio = sympy.Rational(size, result_size)
            first, last = sympy.floor(STEP * ratio), sympy.ceiling((STEP + 1) * ratio) - 1
            reaches[name] = Reach(first, last, size, written=bool(size % result_size))

        def localize(part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
            return {"output_size": [int(size) for size in part.results[0][-rank:]]} if cut & set(names) else {}

        return windowed(_resampling_line(names, "; linear self"), call, reaches, localize)

    return rule


def _resampling_line(names: Sequence[str], clauses: str) -> str:
    """Return a line with windows in spatial dimensions: ``batch* channels height~ width~ -> batch* channels height width``."""
    return f"batch* channels {' '.join(f'{name}~' for name in names)} -> batch* channels {' '.join(names)}{clauses}"


# -- interpolation ---------------------------------------------------------------------------------------------------------------------


def interpolate(rank: int, kind: str) -> Callable[[Call], Loops]:
    """Return the rule of interpolation of a kind: ``"nearest"``, ``"nearest_exact"``, ``"linear"`` or ``"cubic"``."""

    def rule(call: Call) -> Loops:
        names, sizes = space(rank), _input_space(call, rank)
        result_sizes = _result_space(call, rank)
        corners, scales = bool(call.get("align_corners")), scales_of(call.arguments, rank)
        is_integer = not corners and all(map(_is_integer_scale, sizes, result_sizes, scales))
        multiples = [result_size // size for size, result_size in zip(sizes, result_sizes, strict=True)]  # the scales, if is_integer
        reaches = {
            name: _integer_scale(size, multiple, kind) if is_integer else _any_scale(size, result_size, kind, corners, scale)
            for name, size, result_size, multiple, scale in zip(names, sizes, result_sizes, multiples, scales, strict=True)
        }

        def localize(part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
            """Ask for all results of the elements that a part reads; surplus ones are cut off (``Reach.skip``).

            This holds for integer scales; a part of any other scale is decomposed, without these arguments.
            """
            if not cut & set(names):
                return {}
            output_size = [
                int(local) * multiple if name in cut else result_size
                for name, local, result_size, multiple in zip(names, part.operands[0][-rank:], result_sizes, multiples, strict=True)
            ]
            sizes_without_scales: dict[str, Any] = {"output_size": output_size, **dict.fromkeys(_SCALES)}
            return {name: value for name, value in sizes_without_scales.items() if name in call.arguments}

        return windowed(_resampling_line(names, "; linear input self"), call, reaches, localize)

    return rule


def scales_of(arguments: Mapping[str, Any], rank: int) -> list[float | None]:
    """Return the scale factor of each spatial dimension that a call gives; None where it follows from the sizes."""
    if arguments.get("scale_factors"):
        return list(arguments["scale_factors"])
    names = ("scales",) if rank == 1 else ("scales_d", "scales_h", "scales_w")[3 - rank :]
    return [arguments.get(name) for name in names]


_SCALES = ("scale_factors", "scales", "scales_d", "scales_h", "scales_w")
"""Parameters of interpolation that hold scale factors."""

_NEIGHBOURS = {"nearest": 0, "nearest_exact": 0, "linear": 1, "cubic": 2}
"""How many elements a result may read on either side of its position."""


def _is_integer_scale(size: int, result_size: int, scale: float | None) -> bool:
    return result_size % size == 0 and (scale is None or scale == result_size // size)


def _integer_scale(size: int, scale: int, kind: str) -> Reach:
    """Return the reads of a part that calls the same op on the elements that it reads."""
    element, margin = sympy.floor(STEP / sympy.Integer(scale)), _NEIGHBOURS[kind]
    return Reach(element - margin, element + margin, size, border="replicate", skip=STEP - scale * (element - margin))


def _any_scale(size: int, result_size: int, kind: str, corners: bool, scale: float | None) -> Reach:
    """Return the reads of a part for which the op is decomposed (``Reach.written``); ``corners`` is ``align_corners``."""
    half = sympy.Rational(1, 2)
    if corners:
        centre = STEP * (sympy.Rational(size - 1, result_size - 1) if result_size > 1 else sympy.Integer(0))
    else:
        ratio = sympy.Rational(1 / scale).limit_denominator(2**20) if scale else sympy.Rational(size, result_size)
        centre = STEP * ratio if kind == "nearest" else (STEP + half) * ratio - half
    margin = _NEIGHBOURS[kind] + 1  # one more on either side: the op rounds
    first, last = (sympy.Max(0, sympy.Min(size - 1, sympy.floor(centre) + offset)) for offset in (-margin, margin + 1))
    return Reach(first, last, size, border="clamp", written=True)


# -- padding, order --------------------------------------------------------------------------------------------------------------------

_BORDERS: Mapping[str, Any] = {"constant": "fill", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def padded_space(call: Call) -> Loops:
    """Pad the last dimensions, or crop them by negative amounts.

    ``pad=(1, 2, 3, 4)``: dimension -1 gets 1 element before and 2 after, dimension -2 gets 3 before and 4 after.
    """
    name = "pad" if "pad" in call.arguments else "padding"
    amounts = tuple(call[name])
    shape = call.operand("self").shape
    rank = len(shape)
    mode = str(call.get("mode", _padding_mode(call)))
    padded = {rank - 1 - index // 2 for index, amount in enumerate(amounts) if amount != 0}
    value = call.get("value") or 0.0
    reaches = {}
    for dim in padded:
        size, before = shape[dim], amounts[2 * (rank - 1 - dim)]
        if not isinstance(size, int):
            raise MisfitError("a size that is padded depends on the batch")
        reaches[dim] = Reach(STEP - before, STEP - before, size, border=_BORDERS[mode], fill=float(value))

    def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        remaining = [0 if f"dim{rank - 1 - index // 2}" in cut else amount for index, amount in enumerate(amounts)]
        return {name: remaining} if remaining != list(amounts) else {}

    return _windowed_dimensions(call, reaches, localize, "linear self value" if "value" in call.arguments else "linear self")


def _padding_mode(call: Call) -> str:
    """Return the mode of an op without an argument ``mode``, by its name."""
    op_name = str(call.operator)
    return "reflect" if "reflection" in op_name else "replicate" if "replication" in op_name else "constant"


def _windowed_dimensions(call: Call, reaches: Mapping[int, Reach], localize: Localize, linear: str = "linear self") -> Loops:
    """Return the loops of an op with windows in the dimensions that have reaches: ``dim0 dim1~ -> dim0 dim1``."""
    terms = [f"dim{index}" for index in range(len(call.operand("self").shape))]
    windows = [f"{term}~" if index in reaches else term for index, term in enumerate(terms)]
    line = f"{' '.join(windows)} -> {' '.join(terms)}; {linear}"
    return windowed(line, call, {terms[index]: reach for index, reach in reaches.items()}, localize)


def flip(call: Call) -> Loops:
    """Reverse dimensions."""
    shape = call.operand("self").shape
    dims = {dim % max(len(shape), 1) for dim in call["dims"]}
    reaches = {}
    for dim in dims:
        size = shape[dim]
        if not isinstance(size, int):
            raise MisfitError("a dimension that is flipped depends on the batch")
        reaches[dim] = Reach(size - 1 - STEP, size - 1 - STEP, size)

    def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        return {"dims": [dim for dim in sorted(dims) if f"dim{dim}" not in cut]} if cut else {}

    return _windowed_dimensions(call, reaches, localize)


def roll(call: Call) -> str | Loops:
    """Rotate dimensions; without ``dims`` the flattened tensor is rotated, and nothing is cut."""
    shape, dims = call.operand("self").shape, tuple(call["dims"])
    if not dims:
        return write([whole(len(shape))], [whole(len(shape))], "linear self")
    shifts = dict.fromkeys((dim % len(shape) for dim in dims), 0)
    for dim, shift in zip(dims, spread(call["shifts"], len(dims)), strict=True):
        shifts[dim % len(shape)] += shift
    reaches = {}
    for dim, shift in shifts.items():
        size = shape[dim]
        if not isinstance(size, int):
            raise MisfitError("a dimension that is rolled depends on the batch")
        reaches[dim] = Reach(STEP - shift, STEP - shift, size, border="circular")

    def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        remaining = {dim: shift for dim, shift in shifts.items() if f"dim{dim}" not in cut} or {0: 0}
        return {"dims": list(remaining), "shifts": list(remaining.values())} if cut else {}

    return _windowed_dimensions(call, reaches, localize)


def sliced(call: Call, dim: int, start: int, step: int, localize: Callable[[int], Mapping[str, Any]]) -> Loops:
    """Return the loops of every ``step``-th element from ``start``; ``localize`` gives arguments from how many elements a part reads."""
    size = call.operand("self").shape[dim]
    if not isinstance(size, int):
        raise MisfitError("a dimension of which a piece is taken depends on the batch")
    reach = Reach(start + step * STEP, start + step * STEP, size)

    def localize_dim(part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        return localize(int(part.operands[0][dim])) if f"dim{dim}" in cut else {}

    return _windowed_dimensions(call, {dim: reach}, localize_dim)
