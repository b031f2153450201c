"""Rules of ops that permute dimensions, slice them, and concatenate along them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from passes.rules.bind import MisfitError, bind, dimension, dimensions, numbered, rank_and_dimension, write
from passes.rules.call import Call, Operand
from passes.rules.language import parse
from passes.rules.loops import LocalCall, Loops, Size
from passes.rules.ops.conv_pool import sliced
from passes.rules.window import STEP, Reach

__all__ = [
    "cat", "diagonal", "meshgrid", "move", "narrow", "permute", "repeat", "repeat_interleave", "reverse", "select",
    "select_scatter", "slice_", "slice_scatter", "split", "squeeze", "stack", "swap", "unfold", "unsqueeze", "with_localize",
]  # fmt: skip

_LINEAR = "linear self"


def with_localize(text: str, call: Call, localize: Callable[[LocalCall], Mapping[str, Any]]) -> Loops:
    """Bind a line, with a function that computes the size arguments of a part's call."""
    return dataclasses.replace(bind(parse(text), call), localize=localize)


def _reordered(order: Sequence[int]) -> str:
    before = numbered(len(order))
    return write([before], [[before[index] for index in order]], _LINEAR)


def permute(call: Call) -> str:
    """Dimensions in another order."""
    rank = len(call.operand("self").shape)
    return _reordered([dimension(rank, each) for each in call["dims"]])


def reverse(call: Call) -> str:
    """All dimensions in reverse order."""
    return _reordered(list(reversed(range(len(call.operand("self").shape)))))


def swap(first: str | int, second: str | int) -> Callable[[Call], str]:
    """Two dimensions change places; given by argument name or position."""

    def rule(call: Call) -> str:
        rank = len(call.operand("self").shape)
        order = list(range(rank))
        if rank > 1:
            one, other = (dimension(rank, call[which] if isinstance(which, str) else which) for which in (first, second))
            order[one], order[other] = order[other], order[one]
        return _reordered(order)

    return rule


def move(call: Call) -> str:
    """``movedim``: some dimensions go to new places, the others keep their order."""
    source = call.operand("self")
    rank = len(source.shape)
    going = dict(zip(dimensions(source, call["destination"]), dimensions(source, call["source"]), strict=True))
    staying = iter([index for index in range(rank) if index not in going.values()])
    return _reordered([going[place] if place in going else next(staying) for place in range(rank)])


def unsqueeze(call: Call) -> str:
    """A new dimension of one."""
    before = numbered(len(call.operand("self").shape))
    after = list(before)
    after.insert(dimension(len(before) + 1, call["dim"]), "1")
    return write([before], [after], _LINEAR)


def squeeze(call: Call) -> str:
    """Dimensions of one leave. Others that may be squeezed must not become one in a part: they are not cut."""
    source = call.operand("self")
    chosen = dimensions(source, call.get("dim"))
    before = numbered(len(source.shape), dict.fromkeys(chosen, "!"))
    after = [name for index, name in enumerate(before) if index not in chosen or source.shape[index] != 1]
    return write([before], [after], _LINEAR)


def select(call: Call) -> str:
    """One element of a dimension, or every one."""
    rank, chosen = rank_and_dimension(call)
    before = numbered(rank, {chosen: "!"})
    return write([before], [before[:chosen] + before[chosen + 1 :]], _LINEAR)


def slice_(call: Call) -> str | Loops:
    """Part of a dimension.

    All of it passes the dimension on: an end behind the whole is behind a part too. A part that begins and ends between blocks of equal
    size passes on what is inside a block, and every n-th element what runs over them.
    """
    rank, chosen = rank_and_dimension(call)
    size, start, end, step = call.operand("self").shape[chosen], call["start"] or 0, call["end"], call["step"]
    to_the_end = end is None or end == size or (isinstance(end, int) and (end >= 2**62 or (isinstance(size, int) and end >= size)))
    if start == 0 and step == 1 and to_the_end:
        text = write([numbered(rank)], [numbered(rank)], _LINEAR)
        depends = end is not None and not isinstance(end, int)
        return with_localize(text, call, lambda part: {"end": part.results[0][chosen]}) if depends else text
    known = isinstance(size, int) and all(isinstance(each, int) for each in (start, step, 0 if end is None else end))
    if known and 0 <= start < step and to_the_end and size % step == 0:
        return write([_with(rank, chosen, f"(dim{chosen} step!)")], [numbered(rank)], f"step = {step}", _LINEAR)
    if not known or call.results[0][chosen] == 0:
        return write([numbered(rank, {chosen: "!"})], [numbered(rank, {chosen: "'!"})], _LINEAR)
    numbers = slice(start, end).indices(int(size))[:2]
    if step == 1 and (piece := _piece(call, chosen, numbers, ("start", "end"))) is not None:
        return piece
    return sliced(call, chosen, numbers[0], step, lambda count: {"start": 0, "end": count})


def narrow(call: Call) -> str | Loops:
    """Part of a dimension, from a start and of a length."""
    size, start, length = call.operand("self").shape, call["start"], call["length"]
    chosen = dimension(len(size), call["dim"])
    if start == 0 and length == size[chosen]:
        text = write([numbered(len(size))], [numbered(len(size))], _LINEAR)
        return with_localize(text, call, lambda part: {"length": part.results[0][chosen]})
    if not isinstance(start, int) or not isinstance(length, int) or start < 0 or length == 0:
        return write([numbered(len(size), {chosen: "!"})], [numbered(len(size), {chosen: "'!"})], _LINEAR)
    piece = _piece(call, chosen, (start, length), ("start", "length"))
    return piece or sliced(call, chosen, start, 1, lambda count: {"start": 0, "length": count})


_MANY_BLOCKS = 8
"""Of so many blocks, a piece is a number of elements rather than of blocks: an image without its border, not one of q, k and v."""


def _piece(call: Call, chosen: int, numbers: tuple[int, int], names: tuple[str, str]) -> Loops | None:
    """Part of a dimension that two numbers describe: of blocks of their common divisor with the size it is a number of blocks."""
    source = call.operand("self")
    rank, size = len(source.shape), source.shape[chosen]
    block = math.gcd(size, *numbers) if isinstance(size, int) and call.results[0][chosen] != 0 else 1
    if block == 1 or size // block > _MANY_BLOCKS:
        return None
    name = f"dim{chosen}"
    before, after = (_with(rank, chosen, f"(pieces{prime}! {name})") for prime in ("", "'"))
    loops = bind(parse(write([before], [after], f"{name} = {block}", _LINEAR)), call)
    place = next(index for index, factor in enumerate(loops.factors) if factor.name == name)

    def localize(part: LocalCall) -> Mapping[str, Any]:
        return {argument: number // block * part.factors[place] for argument, number in zip(names, numbers, strict=True)}

    return dataclasses.replace(loops, localize=localize)


def slice_scatter(call: Call) -> str:
    """Part of a dimension is written."""
    rank, chosen = rank_and_dimension(call)
    own, written = numbered(rank, {chosen: "!"}), numbered(rank, {chosen: "'!"})
    return write([own, written], [own], "linear self src")


def select_scatter(call: Call) -> str:
    """One element of a dimension is written."""
    rank, chosen = rank_and_dimension(call)
    own = numbered(rank, {chosen: "!"})
    return write([own, own[:chosen] + own[chosen + 1 :]], [own], "linear self src")


def split(argument: str | None) -> Callable[[Call], Loops]:
    """Pieces of a dimension. Their sizes have a common divisor: inside blocks of that size the dimension may be cut.

    Args:
        argument: that holds the sizes; None where it holds the number of pieces.
    """

    def rule(call: Call) -> Loops:
        rank, chosen = rank_and_dimension(call)
        (before, *after), clauses = _blocks(chosen, rank, [call.operand("self").shape[chosen], *(shape[chosen] for shape in call.results)])
        cut_at_indices = call.get("indices") is not None  # places, which say nothing of a part
        equal = not cut_at_indices and len({shape[chosen] for shape in call.results}) == 1
        given = call.get(argument) if argument is not None else None
        if (argument is None and not equal) or (given is not None and not isinstance(given, tuple) and not equal):
            before, *after = _uncut(chosen, rank, 1 + len(call.results))
            clauses = []
        text = write([before], after, *clauses, _LINEAR)

        def localize(part: LocalCall) -> Mapping[str, Any]:
            sizes = [shape[chosen] for shape in part.results]
            return {} if argument is None else {argument: sizes if isinstance(given, tuple) else sizes[0]}

        return with_localize(text, call, localize)

    return rule


def _blocks(chosen: int, rank: int, sizes: Sequence[Size]) -> tuple[list[list[str]], list[str]]:
    """Terms for tensors that differ in one dimension, which is made of equal blocks in each; and the clause with the size of a block."""
    name = f"dim{chosen}"
    if len(set(sizes[1:])) == 1:
        return [_with(rank, chosen, f"(pieces! {name})"), *[numbered(rank)] * (len(sizes) - 1)], []
    numbers = [size for size in sizes if isinstance(size, int)]
    block = math.gcd(*numbers) if len(numbers) == len(sizes) else 1
    if block <= 1:
        return _uncut(chosen, rank, len(sizes)), []
    return [_with(rank, chosen, f"(pieces{index}! {name})") for index in range(len(sizes))], [f"{name} = {block}"]


def _uncut(chosen: int, rank: int, count: int) -> list[list[str]]:
    return [_with(rank, chosen, f"dim{chosen}{chr(39) * index}!") for index in range(count)]


def _with(rank: int, chosen: int, name: str) -> list[str]:
    found = numbered(rank)
    found[chosen] = name
    return found


def cat(call: Call) -> str:
    """Joined along a dimension, in equal blocks where the sizes have a common divisor. Tensors of one empty dimension do not count."""
    joined = [operand for operand in call.operands if operand.shape != (0,)]
    if not joined:
        raise MisfitError("there are no elements")
    rank = len(joined[0].shape)
    chosen = dimension(rank, call["dim"])
    (after, *before), clauses = _blocks(chosen, rank, [call.results[0][chosen], *(operand.shape[chosen] for operand in joined)])
    terms = iter(before)
    return write([next(terms) if operand in joined else ["_"] for operand in call.operands], [after], *clauses, "linear tensors")


def stack(call: Call) -> str:
    """Joined along a new dimension."""
    rank = len(call.results[0])
    after = _with(rank, dimension(rank, call["dim"]), "pieces!")
    return write([[name for name in after if name != "pieces!"]] * len(call.operands), [after], "linear tensors")


def repeat(argument: str) -> Callable[[Call], Loops]:
    """Copies of the whole behind each other, along every dimension; each part makes its own copies of its own part.

    Args:
        argument: that holds the numbers of copies.
    """

    def rule(call: Call) -> Loops:
        own, rank = len(call.operand("self").shape), len(call.results[0])
        new = rank - own
        after = [f"copies{index}" if index < new else f"(copies{index} dim{index})" for index in range(rank)]
        loops = bind(parse(write([numbered(rank)[new:]], [after], _LINEAR)), call)
        numbers = {factor.name: index for index, factor in enumerate(loops.factors)}
        places = [numbers.get(f"copies{index}") for index in range(rank)]

        def localize(part: LocalCall) -> Mapping[str, Any]:
            return {argument: [1 if place is None else part.factors[place] for place in places]}

        return dataclasses.replace(loops, localize=localize)

    return rule


def repeat_interleave(call: Call) -> Loops | str:
    """Each element is repeated behind itself; without a dimension, of the flattened operand."""
    source = call.operand("self") if "self" in call.arguments else call.operand("repeats")
    rank, copies = len(source.shape), call["repeats"]
    before, after = numbered(rank), numbered(rank)
    if isinstance(copies, Operand):
        return _repeat_unevenly(call)
    if call["dim"] is None:
        after = [f"({' '.join(before)} copies)" if before else "copies"]
    else:
        chosen = dimension(rank, call["dim"])
        after[chosen] = f"({before[chosen]} copies)"
    loops = bind(parse(write([before], [after], _LINEAR)), call)
    place = next((index for index, factor in enumerate(loops.factors) if factor.name == "copies"), None)

    def localize(part: LocalCall) -> Mapping[str, Any]:
        return {"repeats": 1 if place is None else part.factors[place], "output_size": None}

    return dataclasses.replace(loops, localize=localize)


def _repeat_unevenly(call: Call) -> str:
    if "self" not in call.arguments or call["dim"] is None:
        raise MisfitError("the number of results follows from values")
    rank, chosen = rank_and_dimension(call)
    repeats = [f"dim{chosen}!"] if len(call.operand("repeats").shape) else []
    return write([numbered(rank, {chosen: "!"}), repeats], [numbered(rank, {chosen: "'!"})], _LINEAR)


def unfold(call: Call) -> str | Loops:
    """Sliding windows along a dimension; sharded with a halo where its sizes are integers."""
    rank, chosen = rank_and_dimension(call, "dimension")
    name, source = f"dim{chosen}", call.operand("self").shape[chosen]
    window, step = call["size"], call["step"]
    if not all(isinstance(number, int) for number in (source, window, step)):
        return write([numbered(rank, {chosen: "!"})], [[*numbered(rank, {chosen: "'!"}), "window!"]], _LINEAR)
    line = write([numbered(rank, {chosen: "~"})], [[*numbered(rank), "window!"]], _LINEAR)
    return bind(parse(line), call, {name: Reach(step * STEP, step * STEP + window - 1, int(source))})


def diagonal(call: Call) -> str:
    """Two dimensions become one, the last."""
    rank = len(call.operand("self").shape)
    chosen = {dimension(rank, call["dim1"]), dimension(rank, call["dim2"])}
    before = numbered(rank, dict.fromkeys(chosen, "!"))
    return write([before], [[*(name for index, name in enumerate(before) if index not in chosen), "diagonal!"]], _LINEAR)


def meshgrid(call: Call) -> str:
    """One dimension from each operand; all results have all of them."""
    names = numbered(len(call.operands))
    after = list(names)
    if call.get("indexing", "ij") == "xy":
        after[:2] = reversed(after[:2])
    return write([names[operand.index : operand.index + len(operand.shape)] for operand in call.operands], [after])
