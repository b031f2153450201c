"""Sizes of one rank's shards.

Shards of an axis of 10 over 4 ranks have sizes 3, 3, 2, 2, as of ``torch.tensor_split``; over two mesh dimensions, the inner one divides
the shards of the outer one. The batch is divided into equal parts only, so that one graph serves every batch size: sizes are expressions
in the number of a rank's own rows, ``1 / n_row_parts`` of the whole batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from passes.analysis.axes import TensorAxes
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.errors import ConfigError
from passes.ir.layout import Layout, Shard, shards_of
from passes.rules.loops import Size


@dataclass(frozen=True)
class Extents:
    """Sizes of the shards of one rank.

    Attributes:
        sizes: of each axis, unsharded.
        mesh: names and sizes of the mesh dimensions, outermost first.
        coordinate: the rank's position along each.
        batch: the symbol of the batch; in all returned sizes it stands for the rank's own rows. None for a fixed batch.
        n_row_parts: number of parts of the batch.
        segments: see ``Axes.segments``.
    """

    sizes: tuple[Size, ...]
    mesh: tuple[tuple[str, int], ...]
    coordinate: tuple[int, ...]
    batch: sympy.Symbol | None
    n_row_parts: int
    segments: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def whole(self, size: Size) -> Size:
        """Return a size of the whole model as an expression in the rank's own rows: ``batch`` becomes ``n_row_parts * batch``."""
        if isinstance(size, int) or self.batch is None:
            return size
        return _in_own_rows(size, self.batch, self.n_row_parts)

    def parts(self, axis: int, index: int, layout: Sequence[object]) -> tuple[Size, ...]:
        """Return the sizes of an axis's shards over mesh dimension ``index``, within the shard of ``layout``'s outer mesh dimensions."""
        return self._split(self.axis(axis, layout[:index]), index)

    def axis(self, axis: int, layout: Sequence[object]) -> Size:
        """Return the size of the rank's shard of an axis under a layout of all mesh dimensions, or of the outermost ones alone."""
        size = self.whole(self.sizes[axis])
        for index, place in enumerate(layout):
            if _cuts(place, axis):
                size = self._split(size, index)[self.coordinate[index]]
        return size

    def interval(self, axis: int, layout: Sequence[object]) -> tuple[int, int]:
        """Return where the rank's shard of an axis of fixed size starts and ends."""
        start, size = 0, int(self.sizes[axis])
        for index, place in enumerate(layout):
            if _cuts(place, axis):
                parts = microbatch_sizes(size, self.mesh[index][1])
                start += sum(parts[: self.coordinate[index]])
                size = parts[self.coordinate[index]]
        return start, start + size

    def dimension(self, axes: Sequence[int], dimension: int, layout: Layout) -> Size:
        """Return the rank's size of one dimension of a tensor, which holds the given axes."""
        return product(self.axis(axis, shards_of(layout, dimension)) for axis in axes)

    def shape(self, axes: TensorAxes, layout: Layout) -> tuple[Size, ...]:
        """Return the shape of the rank's shard of a tensor."""
        return tuple(self.dimension(of_dimension, dimension, layout) for dimension, of_dimension in enumerate(axes))

    def _split(self, size: Size, index: int) -> tuple[Size, ...]:
        """Return the sizes of the shards of a size over a mesh dimension."""
        name, count = self.mesh[index]
        if isinstance(size, int):
            return microbatch_sizes(size, count)
        part = _equal_part(size, count)
        if part is None:
            raise ConfigError(
                f"a dimension of size {size} cannot be cut into {count} parts over {name!r}: it depends on the batch size",
                remedy="cut the batch over this mesh dimension",
            )
        return (part,) * count


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes."""
    factors = list(sizes)
    numbers = [size for size in factors if isinstance(size, int)]
    return math.prod(numbers) if len(numbers) == len(factors) else _simplified(sympy.Mul(*factors))


@functools.lru_cache(maxsize=65536)
def _in_own_rows(size: sympy.Expr, batch: sympy.Symbol, n_row_parts: int) -> Size:
    """Substitute ``n_row_parts * batch`` for ``batch``."""
    return _simplified(size.subs(batch, n_row_parts * batch))


@functools.lru_cache(maxsize=65536)
def _equal_part(size: sympy.Expr, count: int) -> Size | None:
    """Return ``size / count`` if it is a whole number for every batch size, else None."""
    part = sympy.cancel(size / count)
    return _simplified(part) if all(number.is_integer for number in sympy.Poly(part).coeffs()) else None


@functools.lru_cache(maxsize=65536)
def _simplified(size: sympy.Expr) -> Size:
    """Cancel common factors; return an int if the result is constant."""
    size = sympy.cancel(size)
    return int(size) if size.is_Integer else size


def _cuts(place: object, axis: int) -> bool:
    return isinstance(place, Shard) and place.axis == axis
