"""Bind a line of the rule language to a call: match dimensions with terms, solve for the sizes of factors, and return the loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch

from passes.rules.call import Call, Operand, Shape
from passes.rules.language import ANY_DIMENSION, Dim, Line, Term
from passes.rules.loops import Dimension, Factor, LocalCall, Loops, Size
from passes.rules.window import Reach, Window

__all__ = [
    "MisfitError", "bind", "dimension", "dimensions", "linear_sets", "numbered", "quotient", "rank_and_dimension", "whole", "write",
]  # fmt: skip


_Key: TypeAlias = "tuple[str, int]"
"""A factor: its name, and its place from the right among the dimensions that a star stands for (else 0)."""

_ELEMENTWISE = Term((Dim((ANY_DIMENSION,), star=True),))


class MisfitError(Exception):
    """The call does not match the line; the text says why."""


def bind(line: Line, call: Call, reaches: Mapping[str, Reach] | None = None) -> Loops:
    """Return the loops of a call.

    Args:
        reaches: for each sliding factor, the elements that its steps read.

    Raises:
        MisfitError: dimensions or sizes are not those of the line.
    """
    operands, slid = _without_windows(_operand_dimensions(line, call))
    results = _result_dimensions(line, call)
    known = {(name, 0): _given_size(call, argument) for name, argument in line.sizes.items()}
    places = {(operand, place) for operand, place, _ in slid}
    read = [
        (keys, tuple(1 if (operand.index, place) in places else size for place, size in enumerate(operand.shape)))
        for operand, keys, _ in operands
        if keys is not None
    ]
    sizes = _solve(known, read, list(zip(results, call.results, strict=True)), line)
    kept = [key for key in sizes if sizes[key] != 1]
    numbers = {key: index for index, key in enumerate(kept)}
    added = frozenset(operand.index for operand, _, term in operands if term.added)
    by_index: dict[int, tuple[Dimension, ...]] = {}
    for operand, keys, _ in operands:
        by_index[operand.index] = ((),) * len(operand.shape) if keys is None else _numbered(keys, operand.shape, sizes, numbers)
    return Loops(
        factors=_factors(line, kept, sizes, results),
        operands=tuple(by_index[index] for index in range(len(by_index))),
        results=tuple(_numbered(keys, shape, sizes, numbers) for keys, shape in zip(results, call.results, strict=True)),
        added=added,
        linear=linear_sets(line.linear, call, added),
        unread=frozenset(operand.index for operand, keys, _ in operands if keys is None),
        windows=tuple(Window(operand, dimension, numbers.get(key), (reaches or {})[key[0]]) for operand, dimension, key in slid),
        localize=_localizer(line, numbers),
    )


def _operand_dimensions(line: Line, call: Call) -> list[tuple[Operand, list[tuple[_Key, ...]] | None, Term]]:
    if line.operands is None:
        return [(operand, _aligned(_ELEMENTWISE, len(operand.shape)), _ELEMENTWISE) for operand in call.operands]
    slots = call.slots
    if any(slot is not None for slot in slots[len(line.operands) :]):
        raise MisfitError(f"the call has more tensors than the {len(line.operands)} of the rule")
    return [
        (operand, None if term.unread else _aligned(term, len(operand.shape)), term)
        for term, operand in zip(line.operands, slots, strict=False)
        if operand is not None
    ]


_Keys: TypeAlias = "list[tuple[Operand, list[tuple[_Key, ...]] | None, Term]]"


def _without_windows(operands: _Keys) -> tuple[_Keys, list[tuple[int, int, _Key]]]:
    """Return the operands with sliding dimensions without factors, and (operand, dimension, factor) of each of those dimensions."""
    slid: list[tuple[int, int, _Key]] = []
    found: _Keys = []
    for operand, keys, term in operands:
        sliding = {name for dim in term.dims if dim.window for name in dim.names}
        if keys is not None and sliding:
            slid += [(operand.index, place, key) for place, each in enumerate(keys) for key in each if key[0] in sliding]
            keys = [() if any(key[0] in sliding for key in each) else each for each in keys]  # noqa: PLW2901
        found.append((operand, keys, term))
    return found, slid


def _result_dimensions(line: Line, call: Call) -> list[list[tuple[_Key, ...]]]:
    terms = line.results * len(call.results) if len(line.results) == 1 else line.results
    if len(terms) != len(call.results):
        raise MisfitError(f"the call has {len(call.results)} results, the rule {len(terms)}")
    return [_aligned(term, len(shape)) for term, shape in zip(terms, call.results, strict=True)]


def _aligned(term: Term, rank: int) -> list[tuple[_Key, ...]]:
    """Return the factors of each dimension of a tensor; a star takes surplus dimensions, and missing ones must be optional.

    batch* in, rank 3    [(batch, 1)], [(batch, 0)], [(in, 0)]
    n? c,      rank 1    [(c, 0)]
    """
    n_single = sum(not dim.star for dim in term.dims)
    optional = [index for index, dim in enumerate(term.dims) if dim.optional and not dim.star]
    missing = optional[: max(n_single - rank, 0)]
    dims = [dim for index, dim in enumerate(term.dims) if index not in missing]
    n_single -= len(missing)
    surplus = rank - n_single
    if surplus < 0 or (surplus > 0 and not any(dim.star for dim in dims)):
        raise MisfitError(f"a tensor of {rank} dimensions does not fit a term of {n_single}")
    found: list[tuple[_Key, ...]] = []
    for dim in dims:
        if dim.star:
            found += [((dim.names[0], place),) for place in reversed(range(surplus))]
        else:
            found.append(tuple((name, 0) for name in dim.names))
    return found


def _given_size(call: Call, argument: str | int) -> Size:
    size = call.get(argument) if isinstance(argument, str) else argument
    if isinstance(size, bool) or not isinstance(size, int | sympy.Expr):
        raise MisfitError(f"the argument {argument!r} is no size")
    return size


_Tensor: TypeAlias = "tuple[Sequence[tuple[_Key, ...]], Shape]"


def _solve(known: dict[_Key, Size], operands: Sequence[_Tensor], results: Sequence[_Tensor], line: Line) -> dict[_Key, Size]:
    """Return the size of every factor, in order of appearance: read from its own dimensions, or divided out of composed ones.

    An operand's dimension of size 1 is broadcast, so another one decides the factor's size; results must have the whole size.
    """
    order: dict[_Key, None] = {}
    composed: list[tuple[tuple[_Key, ...], Size]] = []
    for keys, size in _dimensions([*operands, *results]):
        order.update(dict.fromkeys(keys))
        if len(keys) == 1:
            earlier = known.get(keys[0])
            if earlier is None or (earlier == 1 and (keys[0][0] not in line.sizes)):
                known[keys[0]] = size
        elif keys:
            composed.append((keys, size))
    _divide(known, composed)
    for keys, size in _dimensions(operands):
        if size != 1 and _product(known, keys) != size:
            raise MisfitError(f"{_text(keys)} is {_product(known, keys)} in one place and {size} in another")
    for keys, size in _dimensions(results):
        if _product(known, keys) != size:
            raise MisfitError(f"{_text(keys)} is {_product(known, keys)}, but the result has {size}")
    return {key: known[key] for key in order}


def _dimensions(tensors: Sequence[_Tensor]) -> Iterator[tuple[tuple[_Key, ...], Size]]:
    for keys, shape in tensors:
        yield from zip(keys, shape, strict=True)


def _divide(known: dict[_Key, Size], composed: list[tuple[tuple[_Key, ...], Size]]) -> None:
    """Solve for the sizes of factors in composed dimensions: repeatedly, each in which one factor is unknown."""
    while composed:
        left = []
        for keys, size in composed:
            unknown = [key for key in keys if key not in known]
            if len(unknown) > 1 and size == 1:
                known.update(dict.fromkeys(unknown, 1))
            elif len(unknown) == 1:
                found = quotient(size, _product(known, [key for key in keys if key in known]))
                if found is None:
                    raise MisfitError(f"{size} is no multiple of what is known of {_text(keys)}")
                known[unknown[0]] = found
            elif unknown:
                left.append((keys, size))
        if len(left) == len(composed):
            raise MisfitError(f"nothing says how {left[0][1]} is divided into {_text(left[0][0])}")
        composed = left


def quotient(size: Size, divisor: Size) -> Size | None:
    """Return ``size / divisor`` if it is an integer for every batch size; else None."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    if size == divisor:
        return 1
    if divisor == 0 or size == 0:
        return None
    found = sympy.cancel(sympy.sympify(size) / divisor)
    if sympy.fraction(found)[1] != 1:
        return None
    return int(found) if found.is_Integer else found


def _product(sizes: Mapping[_Key, Size], keys: Sequence[_Key]) -> Size:
    return math.prod((sizes[key] for key in keys), start=1)


def _text(keys: Sequence[_Key]) -> str:
    return "(" + " ".join(name for name, _ in keys) + ")" if len(keys) != 1 else keys[0][0]


def _numbered(
    keys: Sequence[tuple[_Key, ...]], shape: Shape, sizes: Mapping[_Key, Size], numbers: Mapping[_Key, int]
) -> tuple[Dimension, ...]:
    """Return the factors of each dimension by number; factors and dimensions of size 1 have none."""
    return tuple(
        () if size == 1 else tuple(numbers[key] for key in each if sizes[key] != 1) for each, size in zip(keys, shape, strict=True)
    )


def _factors(line: Line, keys: list[_Key], sizes: Mapping[_Key, Size], results: list[list[tuple[_Key, ...]]]) -> tuple[Factor, ...]:
    """Return the factors with their names, sizes and reductions.

    A factor that no result has is summed, unless a mark of the line names its reduction. Factors under a star are numbered from the left.

    Args:
        keys: the factors, in order.
        sizes: of all factors, also those of size 1.
        results: for each result the factors of its dimensions.
    """
    in_results = [{key for dimension in result for key in dimension} for result in results]
    width: dict[str, int] = {}
    for name, place in sizes:
        width[name] = max(width.get(name, 0), place + 1)
    factors = []
    for key in keys:
        name, place = key
        reduction = line.marks.get(name)
        n_results = sum(key in found for found in in_results)
        if reduction is None and n_results not in (0, len(results)):
            raise MisfitError(f"{name!r} is in some results and not in others")
        if reduction is None and not n_results:
            if name in line.starred:
                raise MisfitError(f"no result has {_text([key])}, and nothing says how it is reduced")
            reduction = "sum"
        readable = name.rstrip("'")
        numbered = width[name] > 1 or name == ANY_DIMENSION
        factors.append(Factor(f"{readable}{width[name] - 1 - place}" if numbered else readable, sizes[key], reduction))
    return tuple(factors)


def linear_sets(
    sets: Sequence[Sequence[tuple[str, int | None]]], call: Call, added: frozenset[int] = frozenset()
) -> tuple[frozenset[int], ...]:
    """Return the sets of operands in which a call is linear together, from sets of parameter names.

    A number in place of an operand is a constant term: the call is linear only if it is zero. Booleans, and results rounded to integers,
    are never linear.
    """
    found = []
    for members in sets:
        operands: set[Operand] = set()
        for name, index in members:
            value = call.get(name)
            if isinstance(value, Operand):
                operands.add(value)
            elif isinstance(value, tuple):
                tensors = [each for each in value if isinstance(each, Operand)]
                operands.update(tensors if index is None else tensors[index : index + 1])
            elif value is not None and value != 0:
                break
        else:
            if operands and not _rounds(operands, [output.known_dtype for output in call.outputs]):
                found.append(frozenset(operand.index for operand in operands) | added)
    return tuple(dict.fromkeys(found))


def _rounds(operands: set[Operand], results: Sequence[torch.dtype]) -> bool:
    if any(operand.dtype == torch.bool for operand in operands) or torch.bool in results:
        return True
    continuous = any(operand.known_dtype.is_floating_point or operand.known_dtype.is_complex for operand in operands)
    return continuous and not all(dtype.is_floating_point or dtype.is_complex for dtype in results)


def _localizer(line: Line, numbers: Mapping[_Key, int]) -> Callable[[LocalCall], Mapping[str, Any]] | None:
    sizes = {
        argument: numbers[name, 0]
        for name, argument in line.sizes.items()
        if isinstance(argument, str) and (name, 0) in numbers and line.marks.get(name) != "whole"
    }
    shape = line.shape
    if not sizes and shape is None:
        return None

    def localize(part: LocalCall) -> Mapping[str, Any]:
        found: dict[str, Any] = {argument: part.factors[number] for argument, number in sizes.items()}
        if shape is not None:
            found[shape] = list(part.results[0])
        return found

    return localize


# -- write lines of the language, for rules that depend on the call ----------------------------------------------------------------


def numbered(rank: int, marks: Mapping[int, str] | None = None, *, name: str = "dim") -> list[str]:
    """Return a term with a factor for each dimension, some with a mark: ``dim0 dim1! dim2``."""
    return [f"{name}{index}{marks.get(index, '') if marks else ''}" for index in range(rank)]


def whole(rank: int, *, name: str = "dim") -> list[str]:
    """Return a term of factors that are not cut."""
    return numbered(rank, dict.fromkeys(range(rank), "!"), name=name)


def write(operands: Iterable[Sequence[str]], results: Iterable[Sequence[str]], *clauses: str) -> str:
    """Return the line of terms that are lists of dimensions."""
    left, right = (", ".join(" ".join(term) or "()" for term in terms) for terms in (operands, results))
    return "; ".join([f"{left} -> {right}", *clauses])


def dimension(rank: int, given: Any) -> int:
    """Return a dimension counted from the front."""
    if isinstance(given, bool) or not isinstance(given, int):
        raise MisfitError(f"{given!r} is no number of a dimension")
    return given % max(rank, 1)


def dimensions(operand: Operand, given: Any) -> list[int]:
    """Return dimensions counted from the front, given one or several; all of them if none is given."""
    rank = len(operand.shape)
    named = given if isinstance(given, tuple) else () if given is None else (given,)
    return [dimension(rank, each) for each in named] or list(range(rank))


def rank_and_dimension(call: Call, name: str = "dim") -> tuple[int, int]:
    """Return the rank of ``self``, and the dimension that an argument names, counted from the front."""
    rank = len(call.operand("self").shape)
    return rank, dimension(rank, call[name])
