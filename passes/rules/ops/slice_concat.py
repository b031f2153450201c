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

_LINEAR = "linear self"


def with_localize(text: str, call: Call, localize: Callable[[LocalCall], Mapping[str, Any]]) -> Loops:
    """Bind a line; ``localize`` gives the arguments that hold sizes of a part."""
    return dataclasses.replace(bind(parse(text), call), localize=localize)


def _permutation(order: Sequence[int]) -> str:
    """Return the line of a permutation: ``[1, 0]`` is ``dim0 dim1 -> dim1 dim0``."""
    before = numbered(len(order))
    return write([before], [[before[index] for index in order]], _LINEAR)


def permute(call: Call) -> str:
    """Permute dimensions."""
    rank = len(call.operand("self").shape)
    return _permutation([dimension(rank, dim) for dim in call["dims"]])


def reverse(call: Call) -> str:
    """Reverse the order of all dimensions."""
    return _permutation(list(reversed(range(len(call.operand("self").shape)))))


def swap(first: str | int, second: str | int) -> Callable[[Call], str]:
    """Return the rule of an op that swaps two dimensions, each given by the argument that names it, or as a number."""

    def rule(call: Call) -> str:
        rank = len(call.operand("self").shape)
        order = list(range(rank))
        if rank > 1:
            dim0, dim1 = (dimension(rank, call[dim] if isinstance(dim, str) else dim) for dim in (first, second))
            order[dim0], order[dim1] = order[dim1], order[dim0]
        return _permutation(order)

    return rule


def move(call: Call) -> str:
    """Move some dimensions to new positions (``movedim``); the rest keep their order."""
    operand = call.operand("self")
    rank = len(operand.shape)
    moved = dict(zip(dimensions(operand, call["destination"]), dimensions(operand, call["source"]), strict=True))
    others = iter([dim for dim in range(rank) if dim not in moved.values()])
    return _permutation([moved[position] if position in moved else next(others) for position in range(rank)])


def unsqueeze(call: Call) -> str:
    """Insert a dimension of size one."""
    before = numbered(len(call.operand("self").shape))
    after = list(before)
    after.insert(dimension(len(before) + 1, call["dim"]), "1")
    return write([before], [after], _LINEAR)


def squeeze(call: Call) -> str:
    """Remove dimensions of size one. Larger named ones are not cut: a part of size one would be removed too."""
    operand = call.operand("self")
    dims = dimensions(operand, call.get("dim"))
    before = numbered(len(operand.shape), dict.fromkeys(dims, "!"))
    after = [name for index, name in enumerate(before) if index not in dims or operand.shape[index] != 1]
    return write([before], [after], _LINEAR)


def select(call: Call) -> str:
    """Select one element of a dimension, or every one."""
    rank, dim = rank_and_dimension(call)
    before = numbered(rank, {dim: "!"})
    return write([before], [before[:dim] + before[dim + 1 :]], _LINEAR)


def slice_(call: Call) -> str | Loops:
    """Take a slice of a dimension.

    a table, by an open size       the table is read whole, so that ranks store it alike for every size (``Call.varies``)
    all of it                      the dimension is passed on
    every n-th element             the dimension is ``(dim n!)``: the loop over blocks of n elements is passed on
    whole blocks of equal size     the loop inside of a block is passed on (``_slice_of_blocks``)
    anything else                  a part reads the elements that its own results need (``sliced``)
    """
    rank, dim = rank_and_dimension(call)
    size, start, end, step = call.operand("self").shape[dim], call["start"] or 0, call["end"], call["step"]
    beyond_end = isinstance(end, int) and (end >= 2**62 or (isinstance(size, int) and end >= size))
    to_the_end = end is None or end == size or beyond_end
    if call.varies:
        return _uncut(rank, dim)
    if start == 0 and step == 1 and to_the_end:
        line = write([numbered(rank)], [numbered(rank)], _LINEAR)
        symbolic_end = end is not None and not isinstance(end, int)
        return with_localize(line, call, lambda part: {"end": part.results[0][dim]}) if symbolic_end else line
    integers = isinstance(size, int) and all(isinstance(number, int) for number in (start, step, 0 if end is None else end))
    if integers and 0 <= start < step and to_the_end and size % step == 0:
        return write([_rename_dimension(rank, dim, f"(dim{dim} step!)")], [numbered(rank)], f"step = {step}", _LINEAR)
    if not integers or call.results[0][dim] == 0:
        return _uncut(rank, dim)
    first, stop, _ = slice(start, end).indices(int(size))
    blocks = _slice_of_blocks(call, dim, {"start": first, "end": stop}) if step == 1 else None
    return blocks or sliced(call, dim, first, step, lambda count: {"start": 0, "end": count})


def narrow(call: Call) -> str | Loops:
    """Take a slice of a dimension, given by its start and length."""
    shape, start, length = call.operand("self").shape, call["start"], call["length"]
    rank, dim = rank_and_dimension(call)
    if call.varies:
        return _uncut(rank, dim)
    if start == 0 and length == shape[dim]:
        line = write([numbered(rank)], [numbered(rank)], _LINEAR)
        return with_localize(line, call, lambda part: {"length": part.results[0][dim]})
    if not isinstance(start, int) or not isinstance(length, int) or start < 0 or length == 0:
        return _uncut(rank, dim)
    blocks = _slice_of_blocks(call, dim, {"start": start, "length": length})
    return blocks or sliced(call, dim, start, 1, lambda count: {"start": 0, "length": count})


def _uncut(rank: int, dim: int) -> str:
    """Return the line of a call that reads a dimension whole, and returns another one."""
    return write([numbered(rank, {dim: "!"})], [numbered(rank, {dim: "'!"})], _LINEAR)


_MAX_BLOCKS = 8
"""With more blocks, a slice is taken for a number of elements (an image without its border) and not of blocks (one of q, k and v)."""


def _slice_of_blocks(call: Call, dim: int, bounds: Mapping[str, int]) -> Loops | None:
    """Return the loops of a slice of whole blocks, inside of which the dimension may be cut; None if there are no such blocks.

    bounds {"start": 4, "end": 8}, size 12    (pieces! dim0) -> (pieces'! dim0); dim0 = 4, the common divisor
    """
    operand = call.operand("self")
    rank, size = len(operand.shape), operand.shape[dim]
    block = math.gcd(size, *bounds.values()) if isinstance(size, int) and call.results[0][dim] != 0 else 1
    if block == 1 or size // block > _MAX_BLOCKS:
        return None
    name = f"dim{dim}"
    before, after = (_rename_dimension(rank, dim, f"(pieces{prime}! {name})") for prime in ("", "'"))
    loops = bind(parse(write([before], [after], f"{name} = {block}", _LINEAR)), call)
    factor = _factor_index(loops, name)
    assert factor is not None
    return dataclasses.replace(
        loops, localize=lambda part: {argument: number // block * part.factors[factor] for argument, number in bounds.items()}
    )


def _factor_index(loops: Loops, name: str) -> int | None:
    """Return the index of the first factor of this name; None for a factor of size one, which loops do not have."""
    return next((index for index, factor in enumerate(loops.factors) if factor.name == name), None)


def slice_scatter(call: Call) -> str:
    """Overwrite a slice of a dimension."""
    rank, dim = rank_and_dimension(call)
    operand, source = numbered(rank, {dim: "!"}), numbered(rank, {dim: "'!"})
    return write([operand, source], [operand], "linear self src")


def select_scatter(call: Call) -> str:
    """Overwrite one element of a dimension."""
    rank, dim = rank_and_dimension(call)
    operand = numbered(rank, {dim: "!"})
    return write([operand, operand[:dim] + operand[dim + 1 :]], [operand], "linear self src")


def split(argument: str | None) -> Callable[[Call], Loops]:
    """Return the rule of a split of a dimension, which may be cut inside of blocks of a size that divides all pieces.

    The argument holds the size of all pieces or the list of sizes; None for ops that take the number of pieces, or indices.
    """

    def rule(call: Call) -> Loops:
        rank, dim = rank_and_dimension(call)
        piece_sizes = [shape[dim] for shape in call.results]
        (before, *after), clauses = _block_terms(dim, rank, [call.operand("self").shape[dim], *piece_sizes])
        value = call.get(argument) if argument is not None else None
        needs_equal_pieces = argument is None or (value is not None and not isinstance(value, tuple))
        at_indices = call.get("indices") is not None  # positions in the whole dimension, which a part does not have
        if call.varies or (needs_equal_pieces and (at_indices or len(set(piece_sizes)) != 1)):
            before, *after = _uncut_terms(dim, rank, 1 + len(call.results))
            clauses = []
        line = write([before], after, *clauses, _LINEAR)

        def localize(part: LocalCall) -> Mapping[str, Any]:
            sizes = [shape[dim] for shape in part.results]
            return {} if argument is None else {argument: sizes if isinstance(value, tuple) else sizes[0]}

        return with_localize(line, call, localize)

    return rule


def _block_terms(dim: int, rank: int, sizes: Sequence[Size]) -> tuple[list[list[str]], list[str]]:
    """Return terms for a tensor and its pieces along a dimension, from their sizes, and the clause with the size of a block.

    sizes 6, 3, 3    (pieces! dim0), dim0, dim0
    sizes 6, 4, 2    (pieces0! dim0), (pieces1! dim0), (pieces2! dim0); dim0 = 2
    """
    name = f"dim{dim}"
    if len(set(sizes[1:])) == 1:
        return [_rename_dimension(rank, dim, f"(pieces! {name})"), *[numbered(rank)] * (len(sizes) - 1)], []
    integers = [size for size in sizes if isinstance(size, int)]
    block = math.gcd(*integers) if len(integers) == len(sizes) else 1
    if block <= 1:
        return _uncut_terms(dim, rank, len(sizes)), []
    return [_rename_dimension(rank, dim, f"(pieces{index}! {name})") for index in range(len(sizes))], [f"{name} = {block}"]


def _uncut_terms(dim: int, rank: int, count: int) -> list[list[str]]:
    """Return terms for tensors of different sizes in a dimension that is not cut: ``dim0! dim1``, ``dim0'! dim1``, ..."""
    return [_rename_dimension(rank, dim, f"dim{dim}{chr(39) * index}!") for index in range(count)]


def _rename_dimension(rank: int, dim: int, name: str) -> list[str]:
    """Return ``numbered(rank)`` with another name for one dimension."""
    term = numbered(rank)
    term[dim] = name
    return term


def cat(call: Call) -> str:
    """Concatenated along a dimension, in blocks of a size that divides all. An operand of shape ``(0,)`` is ignored, as in PyTorch."""
    joined = [operand for operand in call.operands if operand.shape != (0,)]
    if not joined:
        raise MisfitError("there are no elements")
    rank = len(joined[0].shape)
    dim = dimension(rank, call["dim"])
    sizes = [call.results[0][dim], *(operand.shape[dim] for operand in joined)]
    (after, *before), clauses = (_uncut_terms(dim, rank, len(sizes)), []) if call.varies else _block_terms(dim, rank, sizes)
    terms = iter(before)
    return write([next(terms) if operand in joined else ["_"] for operand in call.operands], [after], *clauses, "linear tensors")


def stack(call: Call) -> str:
    """Concatenated along a new dimension."""
    rank = len(call.results[0])
    after = _rename_dimension(rank, dimension(rank, call["dim"]), "pieces!")
    return write([[name for name in after if name != "pieces!"]] * len(call.operands), [after], "linear tensors")


def repeat(argument: str) -> Callable[[Call], Loops]:
    """Return the rule of ops that repeat a tensor; the argument holds the number of copies in each dimension.

    (2, 3) repeated (4, 5, 6) times    dim1 dim2 -> copies0 (copies1 dim1) (copies2 dim2)
    """

    def rule(call: Call) -> Loops:
        rank = len(call.results[0])
        n_new = rank - len(call.operand("self").shape)
        after = [f"copies{index}" if index < n_new else f"(copies{index} dim{index})" for index in range(rank)]
        loops = bind(parse(write([numbered(rank)[n_new:]], [after], _LINEAR)), call)
        factors = [_factor_index(loops, f"copies{index}") for index in range(rank)]
        return dataclasses.replace(
            loops, localize=lambda part: {argument: [1 if factor is None else part.factors[factor] for factor in factors]}
        )

    return rule


def repeat_interleave(call: Call) -> Loops | str:
    """Repeat each element in place; without a dimension, those of the flattened operand."""
    operand = call.operand("self") if "self" in call.arguments else call.operand("repeats")
    rank = len(operand.shape)
    before, after = numbered(rank), numbered(rank)
    if isinstance(call["repeats"], Operand):
        return _repeat_unevenly(call)
    if call["dim"] is None:
        after = [f"({' '.join(before)} copies)" if before else "copies"]
    else:
        dim = dimension(rank, call["dim"])
        after[dim] = f"({before[dim]} copies)"
    loops = bind(parse(write([before], [after], _LINEAR)), call)
    copies = _factor_index(loops, "copies")
    return dataclasses.replace(loops, localize=lambda part: {"repeats": 1 if copies is None else part.factors[copies], "output_size": None})


def _repeat_unevenly(call: Call) -> str:
    """Return the line of ``repeat_interleave`` with a tensor of repeats, one for each element: the dimension is not cut."""
    if "self" not in call.arguments or call["dim"] is None:
        raise MisfitError("the number of results follows from values")
    rank, dim = rank_and_dimension(call)
    repeats = [f"dim{dim}!"] if len(call.operand("repeats").shape) else []
    return write([numbered(rank, {dim: "!"}), repeats], [numbered(rank, {dim: "'!"})], _LINEAR)


def unfold(call: Call) -> str | Loops:
    """Sliding windows along a dimension; sharded with a halo where its sizes are integers."""
    rank, dim = rank_and_dimension(call, "dimension")
    name, source = f"dim{dim}", call.operand("self").shape[dim]
    window, step = call["size"], call["step"]
    if not all(isinstance(number, int) for number in (source, window, step)):
        return write([numbered(rank, {dim: "!"})], [[*numbered(rank, {dim: "'!"}), "window!"]], _LINEAR)
    line = write([numbered(rank, {dim: "~"})], [[*numbered(rank), "window!"]], _LINEAR)
    return bind(parse(line), call, {name: Reach(step * STEP, step * STEP + window - 1, int(source))})


def diagonal(call: Call) -> str:
    """Replace two dimensions by their diagonal, the last dimension."""
    rank = len(call.operand("self").shape)
    dims = {dimension(rank, call["dim1"]), dimension(rank, call["dim2"])}
    before = numbered(rank, dict.fromkeys(dims, "!"))
    return write([before], [[*(name for index, name in enumerate(before) if index not in dims), "diagonal!"]], _LINEAR)


def meshgrid(call: Call) -> str:
    """Take one dimension from each operand; all results have all of them."""
    names = numbered(len(call.operands))
    after = list(names)
    if call.get("indexing", "ij") == "xy":
        after[:2] = reversed(after[:2])
    return write([names[operand.index : operand.index + len(operand.shape)] for operand in call.operands], [after])
