"""Operations whose loops slide over space: convolution, pooling, interpolation, padding. A part reads what its windows reach."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from passes.rules.bind import MisfitError, bind
from passes.rules.call import Call
from passes.rules.language import parse
from passes.rules.loops import LocalCall, Loops, Size
from passes.rules.window import STEP, Reach

__all__ = [
    "adaptive_pool", "convolution", "convolution_of_arguments", "flip", "interpolate", "padded_space", "pool", "roll", "scattered",
    "sliced", "sliding", "space", "windowed",
]  # fmt: skip

Localize = Callable[[LocalCall, frozenset[str]], Mapping[str, Any]]
"""The arguments of a part, given the names of the loops that are cut."""


def space(rank: int) -> tuple[str, ...]:
    """The names of the dimensions of space."""
    return {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}[rank]


def windowed(line: str, call: Call, reaches: Mapping[str, Reach], localize: Localize) -> Loops:
    """The loops of a call with windows."""
    loops = bind(parse(line), call, reaches)
    inherited = loops.localize

    def of_part(part: LocalCall) -> Mapping[str, Any]:
        found = dict(inherited(part)) if inherited is not None else {}
        found.update(localize(part, frozenset(loops.factors[factor].name for factor in part.cut)))
        return found

    return dataclasses.replace(loops, localize=of_part)


def spread(value: Any, rank: int) -> tuple[int, ...]:
    """A number, or one for each dimension, as one for each."""
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(number, int) for number in numbers):
        raise MisfitError("a window's size depends on the batch")
    return numbers * rank if len(numbers) == 1 else numbers


def fixed(call: Call, rank: int) -> tuple[int, ...]:
    """The sizes of space of an operand."""
    return _numbers(call.operand("input", "self").shape[-rank:])


def steps_of(call: Call, rank: int) -> tuple[int, ...]:
    """The sizes of space of the result."""
    return _numbers(call.results[0][-rank:])


def _numbers(sizes: Sequence[Size]) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in sizes):
        raise MisfitError("the size of space depends on the batch")
    return tuple(int(size) for size in sizes)


# -- convolution -----------------------------------------------------------------------------------------------------------------------


def convolution(rank: int, *, transposed: bool = False) -> Callable[[Call], Loops]:
    """A rule of ``(batch, channels, space*)`` with windows over so many dimensions of space."""

    def rule(call: Call) -> Loops:
        return _convolution(call, rank, transposed)

    return rule


def convolution_of_arguments(call: Call) -> Loops:
    """``aten.convolution``, whose arguments say which it is."""
    return _convolution(call, len(call.operand("weight").shape) - 2, bool(call["transposed"]))


def _convolution(call: Call, rank: int, transposed: bool) -> Loops:
    names, sizes = space(rank), fixed(call, rank)
    kernel = _numbers(call.operand("weight").shape[2:])
    stride, dilation = spread(call["stride"], rank), spread(call["dilation"], rank)
    extents = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    padding = (0,) * rank if isinstance(call["padding"], str) else spread(call["padding"], rank)
    reaches = {}
    for name, size, step, before, extent in zip(names, sizes, stride, padding, extents, strict=True):
        reaches[name] = scattered(size, step, before, extent) if transposed else sliding(size, step, before, extent)
    slides = call["padding"] != "same"  # numbers are in its place, unless what is added is uneven

    def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        if not cut & set(names) or isinstance(call["padding"], str):
            return {}
        found: dict[str, Any] = {"padding": [0 if name in cut else before for name, before in zip(names, padding, strict=True)]}
        if transposed:
            after = spread(call["output_padding"], rank)
            found["output_padding"] = [0 if name in cut else more for name, more in zip(names, after, strict=True)]
        return found

    marks = ("~", "") if slides else ("!", "'!")
    terms = [" ".join(f"{front}{name}{back}" for name in names) for front, back in (("", marks[0]), ("", marks[1]), ("kernel_", "!"))]
    weight = "(groups channels_in) channels_out" if transposed else "(groups channels_out) channels_in"
    line = (
        f"batch* (groups channels_in) {terms[0]}, {weight} {terms[2]}, +(groups channels_out) -> batch* (groups channels_out) {terms[1]}"
        "; groups = groups; linear input | weight"
    )
    return windowed(line, call, reaches, localize)


def sliding(size: int, stride: int, before: int, extent: int, **more: Any) -> Reach:
    """A window that moves by ``stride`` and reaches ``extent`` elements beyond its first."""
    return Reach(stride * STEP - before, stride * STEP - before + extent, size, **more)


def scattered(size: int, stride: int, before: int, extent: int) -> Reach:
    """Every element is spread over a window of the result: a step reads all elements whose windows hold it.

    Between windows that leave gaps, it reads the elements on both sides, so that what they make holds the step.
    """
    place, step = STEP + before, sympy.Integer(stride)
    above, below = sympy.ceiling((place - extent) / step), sympy.floor(place / step)
    first = sympy.Min(above, below)
    return Reach(first, sympy.Max(above, below), size, skip=place - stride * first)


# -- pooling ---------------------------------------------------------------------------------------------------------------------------


def pool(rank: int, kind: str) -> Callable[[Call], Loops]:
    """The maximum or the average of each window.

    Args:
        kind: ``"max"`` or ``"avg"``.
    """

    def rule(call: Call) -> Loops:
        names, sizes = space(rank), fixed(call, rank)
        kernel, padding = spread(call["kernel_size"], rank), spread(call["padding"], rank)
        stride = spread(call["stride"], rank) if call["stride"] else kernel
        dilation = spread(call.get("dilation", 1), rank)
        steps = steps_of(call, rank)
        reaches = {}
        for index, name in enumerate(names):
            extent = dilation[index] * (kernel[index] - 1)
            beyond = padding[index] > 0 or stride[index] * (steps[index] - 1) + extent >= sizes[index]
            counted = kind == "avg" and beyond and not call.get("divisor_override")
            fill = -math.inf if kind == "max" else 0.0
            reaches[name] = sliding(sizes[index], stride[index], padding[index], extent, fill=fill, written=counted)

        def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
            if not cut & set(names):
                return {}
            return {
                "padding": [0 if name in cut else before for name, before in zip(names, padding, strict=True)],
                "ceil_mode": bool(call["ceil_mode"]) and not cut >= set(names),
            }

        linear = "; linear self" if kind == "avg" else ""
        return windowed(_resampled(names, linear), call, reaches, localize)

    return rule


def adaptive_pool(rank: int) -> Callable[[Call], str | Loops]:
    """Averages of as many windows as there are results; of one, all of space is the window."""

    def rule(call: Call) -> str | Loops:
        names, sizes = space(rank), fixed(call, rank)
        steps = steps_of(call, rank)
        if all(step == 1 for step in steps):
            return f"batch* channels {' '.join(f'{name}:mean' for name in names)} -> batch* channels {'1 ' * rank}; linear self"
        reaches = {}
        for name, size, step in zip(names, sizes, steps, strict=True):
            ratio = sympy.Rational(size, step)
            first, last = sympy.floor(STEP * ratio), sympy.ceiling((STEP + 1) * ratio) - 1
            reaches[name] = Reach(first, last, size, written=bool(size % step))

        def localize(part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
            return {"output_size": [int(size) for size in part.results[0][-rank:]]} if cut & set(names) else {}

        return windowed(_resampled(names, "; linear self"), call, reaches, localize)

    return rule


def _resampled(names: Sequence[str], clauses: str) -> str:
    return f"batch* channels {' '.join(f'{name}~' for name in names)} -> batch* channels {' '.join(names)}{clauses}"


# -- interpolation ---------------------------------------------------------------------------------------------------------------------


def interpolate(rank: int, kind: str) -> Callable[[Call], Loops]:
    """Between the nearest elements.

    Args:
        kind: ``"nearest"``, ``"nearest_exact"``, ``"linear"`` or ``"cubic"``.
    """

    def rule(call: Call) -> Loops:
        names, sizes = space(rank), fixed(call, rank)
        steps = steps_of(call, rank)
        corners, scales = bool(call.get("align_corners")), scales_of(call.arguments, rank)
        is_whole = not corners and all(_is_whole(*each) for each in zip(sizes, steps, scales, strict=True))
        reaches = {
            name: _whole_factor(size, step // size, kind) if is_whole else _any_factor(size, step, kind, corners, scale)
            for name, size, step, scale in zip(names, sizes, steps, scales, strict=True)
        }

        def localize(part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
            """On what is read, with a whole number of results for each element; what stands too much is cut off."""
            if not cut & set(names):
                return {}
            output = [
                int(size) * (step // before) if name in cut else step
                for name, size, step, before in zip(names, part.operands[0][-rank:], steps, sizes, strict=True)
            ]
            known = {"output_size": output, "scale_factors": None, "scales": None, "scales_d": None, "scales_h": None, "scales_w": None}
            return {name: value for name, value in known.items() if name in call.arguments}

        return windowed(_resampled(names, "; linear input self"), call, reaches, localize)

    return rule


def scales_of(arguments: Mapping[str, Any], rank: int) -> list[float | None]:
    """The factors that a call names, one for each dimension; None where sizes tell."""
    if arguments.get("scale_factors"):
        return list(arguments["scale_factors"])
    names = ("scales",) if rank == 1 else ("scales_d", "scales_h", "scales_w")[3 - rank :]
    return [arguments.get(name) for name in names]


_NEIGHBOURS = {"nearest": 0, "nearest_exact": 0, "linear": 1, "cubic": 2}
"""How many elements on either side of a result it may read."""


def _is_whole(size: int, steps: int, scale: float | None) -> bool:
    return steps % size == 0 and (scale is None or scale == steps // size)


def _whole_factor(size: int, factor: int, kind: str) -> Reach:
    """A part is the same operation on what it reads."""
    element, margin = sympy.floor(STEP / sympy.Integer(factor)), _NEIGHBOURS[kind]
    return Reach(element - margin, element + margin, size, border="replicate", skip=STEP - factor * (element - margin))


def _any_factor(size: int, steps: int, kind: str, corners: bool, scale: float | None) -> Reach:
    """A part is written out."""
    half = sympy.Rational(1, 2)
    if corners:
        centre = STEP * (sympy.Rational(size - 1, steps - 1) if steps > 1 else sympy.Integer(0))
    else:
        ratio = sympy.Rational(1 / scale).limit_denominator(2**20) if scale else sympy.Rational(size, steps)
        centre = STEP * ratio if kind == "nearest" else (STEP + half) * ratio - half
    margin = _NEIGHBOURS[kind] + 1  # one more on either side: the operation rounds
    first, last = (sympy.Max(0, sympy.Min(size - 1, sympy.floor(centre) + offset)) for offset in (-margin, margin + 1))
    return Reach(first, last, size, border="clamp", written=True)


# -- padding, order --------------------------------------------------------------------------------------------------------------------

_BORDERS: Mapping[str, Any] = {"constant": "fill", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def padded_space(call: Call) -> Loops:
    """The last dimensions grow where elements are put around them, and shrink where the padding is negative."""
    name = "pad" if "pad" in call.arguments else "padding"
    amounts = tuple(call[name])
    shape = call.operand("self").shape
    rank = len(shape)
    mode = str(call.get("mode", _mode_of(call)))
    changed = {rank - 1 - index // 2 for index, amount in enumerate(amounts) if amount != 0}
    value = call.get("value") or 0.0
    reaches = {}
    for dim in changed:
        size, before = shape[dim], amounts[2 * (rank - 1 - dim)]
        if not isinstance(size, int):
            raise MisfitError("a size that is padded depends on the batch")
        reaches[dim] = Reach(STEP - before, STEP - before, size, border=_BORDERS[mode], fill=float(value))

    def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        left = [0 if f"dim{rank - 1 - index // 2}" in cut else amount for index, amount in enumerate(amounts)]
        return {name: left} if left != list(amounts) else {}

    return _reordered(call, reaches, localize, "linear self value" if "value" in call.arguments else "linear self")


def _mode_of(call: Call) -> str:
    text = str(call.operator)
    return "reflect" if "reflection" in text else "replicate" if "replication" in text else "constant"


def _reordered(call: Call, reaches: Mapping[int, Reach], localize: Localize, linear: str = "linear self") -> Loops:
    terms = [f"dim{index}" for index in range(len(call.operand("self").shape))]
    windows = [f"{term}~" if index in reaches else term for index, term in enumerate(terms)]
    line = f"{' '.join(windows)} -> {' '.join(terms)}; {linear}"
    return windowed(line, call, {terms[index]: reach for index, reach in reaches.items()}, localize)


def flip(call: Call) -> Loops:
    """Dimensions read from their ends."""
    shape = call.operand("self").shape
    dims = {dim % max(len(shape), 1) for dim in call["dims"]}
    reaches = {dim: Reach(size - 1 - STEP, size - 1 - STEP, size) for dim in dims if isinstance(size := shape[dim], int)}
    if len(reaches) != len(dims):
        raise MisfitError("a dimension that is flipped depends on the batch")

    def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        return {"dims": [dim for dim in sorted(dims) if f"dim{dim}" not in cut]} if cut else {}

    return _reordered(call, reaches, localize)


def _whole(rank: int) -> str:
    return " ".join(f"dim{index}!" for index in range(rank)) or "()"


def roll(call: Call) -> str | Loops:
    """Dimensions that begin elsewhere and go round."""
    shape, dims = call.operand("self").shape, tuple(call["dims"])
    if not dims:
        return f"{_whole(len(shape))} -> {_whole(len(shape))}; linear self"
    shifts = dict.fromkeys((dim % len(shape) for dim in dims), 0)
    for dim, shift in zip(dims, spread(call["shifts"], len(dims)), strict=True):
        shifts[dim % len(shape)] += shift
    reaches = {
        dim: Reach(STEP - shift, STEP - shift, size, border="circular")
        for dim, shift in shifts.items()
        if isinstance(size := shape[dim], int)
    }
    if len(reaches) != len(shifts):
        raise MisfitError("a dimension that is rolled depends on the batch")

    def localize(_part: LocalCall, cut: frozenset[str]) -> Mapping[str, Any]:
        kept = {dim: shift for dim, shift in shifts.items() if f"dim{dim}" not in cut} or {0: 0}
        return {"dims": list(kept), "shifts": list(kept.values())} if cut else {}

    return _reordered(call, reaches, localize)


def sliced(call: Call, chosen: int, start: int, step: int, localize: Callable[[int], Mapping[str, Any]]) -> Loops:
    """Every so manyeth element of a dimension, from a start.

    Args:
        localize: the arguments of a part, from how many elements it reads.
    """
    size = call.operand("self").shape[chosen]
    if not isinstance(size, int):
        raise MisfitError("a dimension of which a piece is taken depends on the batch")
    reach = Reach(start + step * STEP, start + step * STEP, size)
    return _reordered(call, {chosen: reach}, lambda part, cut: localize(int(part.operands[0][chosen])) if cut & {f"dim{chosen}"} else {})
