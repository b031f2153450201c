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

_Key: TypeAlias = "tuple[str, int]"
"""A factor: name, and place under a star from the right: ``a b*`` of three dimensions is ``("a", 0)``, ``("b", 1)``, ``("b", 0)``."""

_Dims: TypeAlias = "list[tuple[_Key, ...]]"
"""The factors of each dimension of a tensor."""

_Operands: TypeAlias = "list[tuple[Operand, _Dims | None, Term]]"
"""Each tensor operand with its dimensions (None if it is not read) and its term in the line."""

_ELEMENTWISE = Term((Dim((ANY_DIMENSION,), star=True),))


class MisfitError(Exception):
    """The call does not match the line; the text says why."""


def bind(line: Line, call: Call, reaches: Mapping[str, Reach] | None = None) -> Loops:
    """Return the loops of a call.

    Args:
        reaches: for each factor with windows (``name~``), the elements that its steps read.

    Raises:
        MisfitError: dimensions or sizes are not those of the line.
    """
    operands, windows = _split_off_windows(_operand_dimensions(line, call))
    results = _result_dimensions(line, call)
    size_arguments = {(name, 0): _size_argument(call, argument) for name, argument in line.sizes.items()}
    windowed = {(operand, place) for operand, place, _ in windows}
    operand_tensors: list[_Tensor] = []
    for operand, dims, _ in operands:
        if dims is not None:
            shape = tuple(1 if (operand.index, place) in windowed else size for place, size in enumerate(operand.shape))
            operand_tensors.append((dims, shape))
    sizes = _solve_sizes(size_arguments, operand_tensors, list(zip(results, call.results, strict=True)), line)
    loop_keys = [key for key in sizes if sizes[key] != 1]
    numbers = {key: index for index, key in enumerate(loop_keys)}
    added = frozenset(operand.index for operand, _, term in operands if term.added)
    by_index: dict[int, tuple[Dimension, ...]] = {}
    for operand, dims, _ in operands:
        by_index[operand.index] = ((),) * len(operand.shape) if dims is None else _factor_numbers(dims, operand.shape, sizes, numbers)
    return Loops(
        factors=_factors(line, loop_keys, sizes, results),
        operands=tuple(by_index[index] for index in range(len(by_index))),
        results=tuple(_factor_numbers(dims, shape, sizes, numbers) for dims, shape in zip(results, call.results, strict=True)),
        added=added,
        linear=linear_sets(line.linear, call, added),
        unread=frozenset(operand.index for operand, dims, _ in operands if dims is None),
        windows=tuple(Window(operand, place, numbers.get(key), (reaches or {})[key[0]]) for operand, place, key in windows),
        localize=_localizer(line, numbers),
    )


def _operand_dimensions(line: Line, call: Call) -> _Operands:
    """Match the terms of a line with the tensors that the call has; an optional tensor that it lacks leaves its term out."""
    if line.operands is None:
        return [(operand, _match_dimensions(_ELEMENTWISE, len(operand.shape)), _ELEMENTWISE) for operand in call.operands]
    slots = call.slots
    if any(slot is not None for slot in slots[len(line.operands) :]):
        raise MisfitError(f"the call has more tensors than the {len(line.operands)} of the rule")
    return [
        (operand, None if term.unread else _match_dimensions(term, len(operand.shape)), term)
        for term, operand in zip(line.operands, slots, strict=False)
        if operand is not None
    ]


def _split_off_windows(operands: _Operands) -> tuple[_Operands, list[tuple[int, int, _Key]]]:
    """Return the operands with no factors in dimensions with windows, and (operand, dimension, factor) of each of these dimensions."""
    windows: list[tuple[int, int, _Key]] = []
    without_windows: _Operands = []
    for operand, dims, term in operands:
        sliding = {name for dim in term.dims if dim.window for name in dim.names}
        if dims is not None and sliding:
            windows += [(operand.index, place, key) for place, keys in enumerate(dims) for key in keys if key[0] in sliding]
            dims = [() if any(name in sliding for name, _ in keys) else keys for keys in dims]  # noqa: PLW2901
        without_windows.append((operand, dims, term))
    return without_windows, windows


def _result_dimensions(line: Line, call: Call) -> list[_Dims]:
    """Match the terms of a line with the results of the call; a single term describes all results."""
    terms = line.results * len(call.results) if len(line.results) == 1 else line.results
    if len(terms) != len(call.results):
        raise MisfitError(f"the call has {len(call.results)} results, the rule {len(terms)}")
    return [_match_dimensions(term, len(shape)) for term, shape in zip(terms, call.results, strict=True)]


def _match_dimensions(term: Term, rank: int) -> _Dims:
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
    factors: _Dims = []
    for dim in dims:
        if dim.star:
            factors += [((dim.names[0], place),) for place in reversed(range(surplus))]
        else:
            factors.append(tuple((name, 0) for name in dim.names))
    return factors


def _size_argument(call: Call, argument: str | int) -> Size:
    """Return the size that a line's clause gives to a factor: the value of an argument of the call, or the number itself."""
    size = call.get(argument) if isinstance(argument, str) else argument
    if isinstance(size, bool) or not isinstance(size, int | sympy.Expr):
        raise MisfitError(f"the argument {argument!r} is no size")
    return size


_Tensor: TypeAlias = "tuple[_Dims, Shape]"


def _solve_sizes(sizes: dict[_Key, Size], operands: list[_Tensor], results: list[_Tensor], line: Line) -> dict[_Key, Size]:
    """Return the size of every factor, in order of appearance: read from its own dimensions, or divided out of composed ones.

    An operand's dimension of size 1 is broadcast, so another one decides the factor's size; results must have the whole size. ``sizes``
    has those that the line's clauses give; the others are added.
    """
    order: dict[_Key, None] = {}
    composed: list[tuple[tuple[_Key, ...], Size]] = []
    for keys, size in _dimensions([*operands, *results]):
        order.update(dict.fromkeys(keys))
        if len(keys) == 1:
            earlier = sizes.get(keys[0])
            if earlier is None or (earlier == 1 and (keys[0][0] not in line.sizes)):
                sizes[keys[0]] = size
        elif keys:
            composed.append((keys, size))
    _solve_composed(sizes, composed)
    for keys, size in _dimensions(operands):
        if size != 1 and _product(sizes, keys) != size:
            raise MisfitError(f"{_text(keys)} is {_product(sizes, keys)} in one place and {size} in another")
    for keys, size in _dimensions(results):
        if _product(sizes, keys) != size:
            raise MisfitError(f"{_text(keys)} is {_product(sizes, keys)}, but the result has {size}")
    return {key: sizes[key] for key in order}


def _dimensions(tensors: list[_Tensor]) -> Iterator[tuple[tuple[_Key, ...], Size]]:
    """Yield (factors, size) of every dimension of every tensor."""
    for dims, shape in tensors:
        yield from zip(dims, shape, strict=True)


def _solve_composed(sizes: dict[_Key, Size], composed: list[tuple[tuple[_Key, ...], Size]]) -> None:
    """Add to ``sizes`` those of factors in composed dimensions: solve dimensions with one unknown factor until none is left.

    (heads head) of 64 with heads = 4    head = 16
    """
    while composed:
        unsolved = []
        for keys, size in composed:
            unknown = [key for key in keys if key not in sizes]
            if len(unknown) > 1 and size == 1:
                sizes.update(dict.fromkeys(unknown, 1))
            elif len(unknown) == 1:
                solution = quotient(size, _product(sizes, [key for key in keys if key in sizes]))
                if solution is None:
                    raise MisfitError(f"{size} is no multiple of what is known of {_text(keys)}")
                sizes[unknown[0]] = solution
            elif unknown:
                unsolved.append((keys, size))
        if len(unsolved) == len(composed):
            raise MisfitError(f"nothing says how {unsolved[0][1]} is divided into {_text(unsolved[0][0])}")
        composed = unsolved


def quotient(size: Size, divisor: Size) -> Size | None:
    """Return ``size / divisor`` if it is an integer for every batch size; else None."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    if size == divisor:
        return 1
    if divisor == 0 or size == 0:
        return None
    result = sympy.cancel(sympy.sympify(size) / divisor)
    if sympy.fraction(result)[1] != 1:
        return None
    return int(result) if result.is_Integer else result


def _product(sizes: Mapping[_Key, Size], keys: Sequence[_Key]) -> Size:
    """Return the size of a dimension that is made of factors."""
    return math.prod((sizes[key] for key in keys), start=1)


def _text(keys: Sequence[_Key]) -> str:
    """Return the factors of a dimension as a line writes them: ``batch``, ``(heads head)``."""
    return "(" + " ".join(name for name, _ in keys) + ")" if len(keys) != 1 else keys[0][0]


def _factor_numbers(dims: _Dims, shape: Shape, sizes: Mapping[_Key, Size], numbers: Mapping[_Key, int]) -> tuple[Dimension, ...]:
    """Return the factors of each dimension by number, without those of size 1; none for dimensions of size 1."""
    factors = [tuple(numbers[key] for key in keys if sizes[key] != 1) for keys in dims]
    return tuple(() if size == 1 else of_dim for of_dim, size in zip(factors, shape, strict=True))


def _factors(line: Line, keys: list[_Key], sizes: Mapping[_Key, Size], results: list[_Dims]) -> tuple[Factor, ...]:
    """Return the factors with their names, sizes and reductions.

    A factor that no result has is summed, unless a mark of the line names its reduction. Factors under a star are numbered from the left,
    also if ``keys`` lacks some of them, because they have size 1.
    """
    keys_of_results = [{key for dimension in result for key in dimension} for result in results]
    star_rank: dict[str, int] = {}
    for name, place in sizes:
        star_rank[name] = max(star_rank.get(name, 0), place + 1)
    factors = []
    for key in keys:
        name, place = key
        reduction = line.marks.get(name)
        n_results = sum(key in keys_of_result for keys_of_result in keys_of_results)
        if reduction is None and n_results not in (0, len(results)):
            raise MisfitError(f"{name!r} is in some results and not in others")
        if reduction is None and not n_results:
            if name in line.starred:
                raise MisfitError(f"no result has {_text([key])}, and nothing says how it is reduced")
            reduction = "sum"
        readable_name = name.rstrip("'")
        if star_rank[name] > 1 or name == ANY_DIMENSION:
            readable_name += str(star_rank[name] - 1 - place)
        factors.append(Factor(readable_name, sizes[key], reduction))
    return tuple(factors)


def linear_sets(
    sets: Sequence[Sequence[tuple[str, int | None]]], call: Call, added: frozenset[int] = frozenset()
) -> tuple[frozenset[int], ...]:
    """Return the sets of operands in which a call is jointly linear; operands that the call adds belong to every set.

    In ``sets``, an index names one tensor of a list. A number in place of a tensor is a constant term: the call is linear only if it is
    zero. Booleans, and results rounded to integers, are never linear.
    """
    linear = []
    for members in sets:
        operands: set[Operand] = set()
        for name, index in members:
            value = call.get(name)
            if isinstance(value, Operand):
                operands.add(value)
            elif isinstance(value, tuple):
                tensors = [item for item in value if isinstance(item, Operand)]
                operands.update(tensors if index is None else tensors[index : index + 1])
            elif value is not None and value != 0:
                break
        else:
            if operands and not _has_discrete_type(operands, [output.known_dtype for output in call.outputs]):
                linear.append(frozenset(operand.index for operand in operands) | added)
    return tuple(dict.fromkeys(linear))


def _has_discrete_type(operands: set[Operand], results: Sequence[torch.dtype]) -> bool:
    """Return whether an operand or result is boolean, or a result of floating-point operands is rounded to integers."""
    if any(operand.dtype == torch.bool for operand in operands) or torch.bool in results:
        return True
    continuous = any(operand.known_dtype.is_floating_point or operand.known_dtype.is_complex for operand in operands)
    return continuous and not all(dtype.is_floating_point or dtype.is_complex for dtype in results)


def _localizer(line: Line, numbers: Mapping[_Key, int]) -> Callable[[LocalCall], Mapping[str, Any]] | None:
    """Return ``Loops.localize``: it sets arguments that are sizes of factors, or the shape of the result; None if there are none."""
    size_arguments = {
        argument: numbers[name, 0]
        for name, argument in line.sizes.items()
        if isinstance(argument, str) and (name, 0) in numbers and line.marks.get(name) != "whole"
    }
    shape = line.shape
    if not size_arguments and shape is None:
        return None

    def localize(part: LocalCall) -> Mapping[str, Any]:
        local: dict[str, Any] = {argument: part.factors[number] for argument, number in size_arguments.items()}
        if shape is not None:
            local[shape] = list(part.results[0])
        return local

    return localize


# -- write lines of the language, for rules that depend on the call ----------------------------------------------------------------


def numbered(rank: int, marks: Mapping[int, str] | None = None, *, name: str = "dim") -> list[str]:
    """Return a term with a factor for each dimension: ``numbered(3, {1: "!"})`` is ``["dim0", "dim1!", "dim2"]``."""
    return [f"{name}{index}{marks.get(index, '') if marks else ''}" for index in range(rank)]


def whole(rank: int, *, name: str = "dim") -> list[str]:
    """Return a term of factors that cannot be cut: ``whole(2)`` is ``["dim0!", "dim1!"]``."""
    return numbered(rank, dict.fromkeys(range(rank), "!"), name=name)


def write(operands: Iterable[Sequence[str]], results: Iterable[Sequence[str]], *clauses: str) -> str:
    """Join terms to a line: ``write([["in"], ["in"]], [[]], "linear self")`` is ``"in, in -> (); linear self"``."""
    left, right = (", ".join(" ".join(term) or "()" for term in terms) for terms in (operands, results))
    return "; ".join([f"{left} -> {right}", *clauses])


def dimension(rank: int, dim: Any) -> int:
    """Return a dimension counted from the front: ``dimension(3, -1)`` is 2."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise MisfitError(f"{dim!r} is no number of a dimension")
    return dim % max(rank, 1)


def dimensions(operand: Operand, dims: Any) -> list[int]:
    """Return dimensions counted from the front, from one or a tuple of several; all dimensions for None or ``()``."""
    rank = len(operand.shape)
    if not isinstance(dims, tuple):
        dims = () if dims is None else (dims,)
    return [dimension(rank, dim) for dim in dims] or list(range(rank))


def rank_and_dimension(call: Call, name: str = "dim") -> tuple[int, int]:
    """Return the rank of ``self``, and the dimension that an argument names, counted from the front."""
    rank = len(call.operand("self").shape)
    return rank, dimension(rank, call[name])
