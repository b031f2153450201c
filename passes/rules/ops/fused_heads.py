"""Rules of calls that take queries, keys and values out of one projection with unequal numbers of heads.

    y = linear(x, weight)       weight rows [24 heads of queries | 8 of keys | 8 of values]      8 groups: 3, 1 and 1 heads in each
    q = y[..., :3072]           y (dim2 pieces!), q (dim2 pieces'!)                              dim2 = 8 groups
    q.view(2, 512, 24, 128)

The dimension of ``y`` is labelled (groups, 5 heads), as if the heads of a group were neighbours. In memory it is a concatenation of
segments, each of which the groups divide: ``Axes.segments``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.schemas import bound_arguments
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import VARIES
from passes.rules.bind import bind, dimension, numbered, write
from passes.rules.call import Call
from passes.rules.language import parse
from passes.rules.loops import LocalCall, Loops

aten = torch.ops.aten

_TAKES = (aten.slice.Tensor, aten.narrow.default, aten.split_with_sizes.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int)  # noqa: SLF001


@dataclass(frozen=True)
class FusedHeads:
    """The last dimension of a tensor that holds queries, keys and values.

    Attributes:
        groups: the number of groups of heads.
        pieces: the size of each piece, in the order of memory.
    """

    groups: int
    pieces: tuple[int, ...]

    @property
    def segments(self) -> tuple[int, ...]:
        """Return the size of each piece in one group."""
        return tuple(size // self.groups for size in self.pieces)


def find_fused_heads(graph: fx.Graph, ranks: int) -> dict[str, FusedHeads]:
    """Return the calls that take pieces of a fused projection with unequal numbers of heads, by name.

    Args:
        ranks: the smallest number of groups to find. Pieces of equal size are blocks, which need no groups.
    """
    found: dict[str, FusedHeads] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() < 2 or not isinstance(value.shape[-1], int):
            continue
        calls = [user for user in node.users if user.target in _TAKES and user.args[0] is node and VARIES not in user.meta]
        pieces = sorted(piece for call in calls for piece in _pieces_of(call, value))
        heads = {(start, size): _heads_of(piece, size) for start, size, _, piece in pieces}
        if len(heads) < 2 or None in heads.values() or not _is_covered(list(heads), value.shape[-1]):
            continue
        numbers, sizes = zip(*filter(None, heads.values()), strict=True)
        groups = math.gcd(*numbers)
        if len(set(sizes)) == 1 and len(set(numbers)) > 1 and groups >= max(ranks, 2):
            fused = FusedHeads(groups, tuple(size for _, size in heads))
            found.update({call.name: fused for call in calls})
    return found


def _pieces_of(call: fx.Node, value: Tensor) -> Iterator[tuple[int, int, str, fx.Node]]:
    """Yield start and size of each piece that a call takes of the last dimension of its operand, its name, and the piece."""
    arguments, size = bound_arguments(call), value.shape[-1]
    if dimension(value.dim(), arguments["dim"]) != value.dim() - 1:
        return
    if call.target is aten.split_with_sizes.default:
        start = 0
        items = {item.args[1]: item for item in call.users}
        for place, length in enumerate(arguments["split_sizes"]):
            if place in items and isinstance(length, int):
                yield start, length, items[place].name, items[place]
            start += length
    elif call.target is aten.narrow.default:
        if isinstance(arguments["start"], int) and isinstance(arguments["length"], int):
            yield arguments["start"] % size, arguments["length"], call.name, call
    elif arguments["step"] == 1 and all(isinstance(arguments[each], int | None) for each in ("start", "end")):
        start, stop, _ = slice(arguments["start"], arguments["end"]).indices(size)
        yield start, stop - start, call.name, call


def _heads_of(piece: fx.Node, size: int) -> tuple[int, int] | None:
    """Return number and size of the heads as which a piece is viewed; None if it is not."""
    for user in piece.users:
        value, own = user.meta.get("val"), piece.meta["val"]
        if user.target in _VIEWS and isinstance(value, Tensor) and value.dim() == own.dim() + 1:
            number, width = map(size_of, value.shape[-2:])
            if isinstance(number, int) and isinstance(width, int) and number * width == size:
                return number, width
    return None


def _is_covered(pieces: list[tuple[int, int]], size: int) -> bool:
    """Return whether pieces ``(start, size)``, in order, are all of a dimension, each element once."""
    end = 0
    for start, length in pieces:
        if start != end:
            return False
        end += length
    return end == size


def loops_of_fused_heads(call: Call, fused: FusedHeads) -> Loops:
    """Return the loops of a call that takes pieces of a fused projection: the groups may be cut."""
    rank = len(call.operand("self").shape)
    dim = rank - 1

    def term(piece: str) -> list[str]:
        dims = numbered(rank)
        dims[dim] = f"(dim{dim} {piece}!)"
        return dims

    after = [term(f"piece{index}") for index in range(len(call.results))]
    loops = bind(parse(write([term("pieces")], after, f"dim{dim} = {fused.groups}", "linear self")), call)
    groups = next(index for index, factor in enumerate(loops.factors) if factor.name == f"dim{dim}")

    def localize(part: LocalCall) -> Mapping[str, Any]:
        if "split_sizes" in call.arguments:
            return {"split_sizes": [shape[dim] for shape in part.results]}
        own, size = part.factors[groups], int(call.operand("self").shape[dim])
        if "length" in call.arguments:
            return {"start": call["start"] % size // fused.groups * own, "length": part.results[0][dim]}
        start, stop, _ = slice(call["start"], call["end"]).indices(size)
        return {"start": start // fused.groups * own, "end": stop // fused.groups * own}

    return dataclasses.replace(loops, localize=localize)
