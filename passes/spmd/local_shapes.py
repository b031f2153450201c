"""Sizes of one rank's parts: how long an axis is where a layout cuts it.

An axis of 10 over 4 ranks is 3, 3, 2, 2 long, as ``torch.tensor_split`` cuts; cut over two mesh dimensions, the inner one cuts what the
outer one left. The batch is cut into equal parts alone, so that one graph serves every batch size: sizes are expressions in a rank's own
rows, of which there are ``1 / n_row_parts`` of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from passes.analysis.axes import TensorAxes
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.errors import ConfigError
from passes.ir.layout import Layout, Shard, shards_of
from passes.rules.loops import Size

__all__ = ["Extents"]


@dataclass(frozen=True)
class Extents:
    """Sizes at one coordinate.

    Attributes:
        sizes: of each axis, in the whole batch.
        mesh: names and sizes of the mesh dimensions, outermost first.
        coordinate: the rank's place along each.
        batch: the symbol of the batch, which stands for the rank's own rows in every size given back; None for a fixed batch.
        n_row_parts: into how many parts the batch is cut.
    """

    sizes: tuple[Size, ...]
    mesh: tuple[tuple[str, int], ...]
    coordinate: tuple[int, ...]
    batch: sympy.Symbol | None
    n_row_parts: int

    def whole(self, size: Size) -> Size:
        """A size in the whole batch, said in the rank's own rows."""
        if isinstance(size, int) or self.batch is None:
            return size
        return _multiplied(size, self.batch, self.n_row_parts)

    def parts(self, axis: int, index: int, layout: Sequence[object]) -> tuple[Size, ...]:
        """The sizes of an axis along one mesh dimension, where the outer mesh dimensions of a layout have cut it already."""
        return self._split(self.axis(axis, layout[:index]), index)

    def axis(self, axis: int, layout: Sequence[object]) -> Size:
        """The size of an axis where a layout, over all mesh dimensions or the outer ones, cuts it."""
        size = self.whole(self.sizes[axis])
        for index, place in enumerate(layout):
            if _cuts(place, axis):
                size = self._split(size, index)[self.coordinate[index]]
        return size

    def interval(self, axis: int, layout: Sequence[object]) -> tuple[int, int]:
        """Where, in an axis of fixed size, the part at the coordinate starts and ends."""
        start, size = 0, int(self.sizes[axis])
        for index, place in enumerate(layout):
            if _cuts(place, axis):
                parts = microbatch_sizes(size, self.mesh[index][1])
                start += sum(parts[: self.coordinate[index]])
                size = parts[self.coordinate[index]]
        return start, start + size

    def dimension(self, axes: Sequence[int], dimension: int, layout: Layout) -> Size:
        """The size of one dimension of a tensor."""
        return product(self.axis(axis, shards_of(layout, dimension)) for axis in axes)

    def shape(self, axes: TensorAxes, layout: Layout) -> tuple[Size, ...]:
        """The shape of a tensor."""
        return tuple(self.dimension(each, dimension, layout) for dimension, each in enumerate(axes))

    def _split(self, size: Size, index: int) -> tuple[Size, ...]:
        name, count = self.mesh[index]
        if isinstance(size, int):
            return microbatch_sizes(size, count)
        part = _divided(size, count)
        if part is None:
            raise ConfigError(
                f"a dimension of size {size} cannot be cut into {count} parts over {name!r}: it depends on the batch size",
                remedy="cut the batch over this mesh dimension",
            )
        return (part,) * count


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes."""
    found = list(sizes)
    numbers = [size for size in found if isinstance(size, int)]
    return math.prod(numbers) if len(numbers) == len(found) else _plain(sympy.Mul(*found))


@functools.lru_cache(maxsize=65536)
def _multiplied(size: sympy.Expr, batch: sympy.Symbol, count: int) -> Size:
    """A size with so many times the batch; the same few are asked for, call after call."""
    return _plain(size.subs(batch, count * batch))


@functools.lru_cache(maxsize=65536)
def _divided(size: sympy.Expr, count: int) -> Size | None:
    """An equal part of a size; None where it is not whole for every batch."""
    part = sympy.cancel(size / count)
    return _plain(part) if all(number.is_integer for number in sympy.Poly(part).coeffs()) else None


@functools.lru_cache(maxsize=65536)
def _plain(size: sympy.Expr) -> Size:
    size = sympy.cancel(size)
    return int(size) if size.is_Integer else size


def _cuts(place: object, axis: int) -> bool:
    return isinstance(place, Shard) and place.axis == axis
