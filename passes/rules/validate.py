"""Prove a rule by execution: cut real operands along every factor, run the parts, put the results together, compare with the whole.

proved = prove_rule(torch.ops.mine.gated.default, torch.randn(4, 6), torch.randn(6))
proved.factors       ("rows", "columns")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.schemas import bound_arguments, draws_random_numbers, node_leaves
from passes.ir.comm.index_ranges import Runs, length, take_runs
from passes.ir.errors import VerificationError
from passes.ir.torch_private import OpOverload, tree_map_only
from passes.rules.loops import Dimension, LocalCall, Loops
from passes.rules.registry import loops_of
from passes.rules.window import Window

__all__ = ["Proof", "call_node", "prove_rule"]

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""Largest difference, relative to the larger of one and the largest element, as sums in another order differ; 1e-12 in float64."""


@dataclass(frozen=True)
class Proof:
    """What a call has shown.

    Attributes:
        loops: what the rule says of the call.
        factors: names of the factors that were cut.
        linear: the sets of operands that were scaled and added.
    """

    loops: Loops
    factors: tuple[str, ...]
    linear: tuple[frozenset[int], ...]


def prove_rule(operator: OpOverload, /, *args: Any, **kwargs: Any) -> Proof:
    """Execute everything that the rule of an operator says of one call.

    Args:
        operator: an overload that has a rule.
        args: real arguments; float64 where numbers are not whole.
        kwargs: likewise.

    Raises:
        VerificationError: there is no rule for the call, or parts do not make the whole.
    """
    node = call_node(operator, *args, **kwargs)
    loops = loops_of(node)
    if loops is None:
        raise VerificationError(f"{operator} has no rule for this call")
    return _Prover(node, loops).prove()


def call_node(operator: OpOverload, /, *args: Any, **kwargs: Any) -> fx.Node:
    """A graph's node that calls an operator on real tensors; every ``meta["val"]`` is the tensor itself."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return [placeholder(each) for each in value] if isinstance(value, list | tuple) else value
        node = graph.placeholder("operand")
        node.meta["val"] = value
        return node

    given = tuple(placeholder(value) for value in args)
    node = graph.call_function(operator, given, {name: placeholder(value) for name, value in kwargs.items()})
    copies, keywords = tree_map_only(Tensor, torch.clone, (args, kwargs))
    node.meta["val"] = operator(*copies, **keywords)
    return node


class _Prover:
    """One call and its loops."""

    def __init__(self, node: fx.Node, loops: Loops) -> None:
        assert isinstance(node.target, OpOverload)
        self.operator, self.loops = node.target, loops
        self.arguments = bound_arguments(node)
        self.operands = [each.meta["val"] for each in node_leaves(self.arguments)]
        self.results = _tensors(node.meta["val"])
        self.sizes = [int(factor.size) for factor in loops.factors]
        self.random = draws_random_numbers(self.operator)

    def fail(self, problem: str) -> VerificationError:
        return VerificationError(f"{self.operator}: {problem}", remedy=f"its loops are {self.loops}")

    def prove(self) -> Proof:
        self.check_sizes()
        written = {window.factor for window in self.loops.windows if window.reach.written}
        factors = [
            index
            for index, factor in enumerate(self.loops.factors)
            if factor.reduction != "whole" and self.sizes[index] > 1 and index not in written
        ]
        for factor in factors:
            for parts in _partitions(self.sizes[factor]):
                self.check_cut(factor, parts)
        for operands in self.loops.linear:
            self.check_linear(sorted(operands))
        if self.loops.unread:
            noise = [torch.full_like(each, 3) if index in self.loops.unread else each for index, each in enumerate(self.operands)]
            self.compare(self.run(noise, self.sizes, self.results), self.results, "an operand is read")
        return Proof(self.loops, tuple(self.loops.factors[factor].name for factor in factors), self.loops.linear)

    def check_sizes(self) -> None:
        pairs = [*zip(self.loops.operands, self.operands, strict=True), *zip(self.loops.results, self.results, strict=True)]
        for number, (dimensions, tensor) in enumerate(pairs):
            is_result = number >= len(self.operands)
            if len(dimensions) != tensor.dim():
                raise self.fail(f"tensor {number} has {tensor.dim()} dimensions, its loops {len(dimensions)}")
            for dimension, size in zip(dimensions, tensor.shape, strict=True):
                product = math.prod(self.sizes[factor] for factor in dimension)
                if product != size and (dimension or is_result):
                    raise self.fail(f"a dimension of size {size} has factors of {product}")

    def check_cut(self, factor: int, parts: Sequence[int]) -> None:
        """Run the parts and compare what they make."""
        name, reduction = self.loops.factors[factor].name, self.loops.factors[factor].reduction
        where = f"cut along {name} into {', '.join(map(str, parts))}"
        made: list[list[Tensor]] = []
        start = 0
        for number, size in enumerate(parts):
            operands = [
                _cut(tensor, dimensions, self.sizes, factor, start, size)
                for tensor, dimensions in zip(self.operands, self.loops.operands, strict=True)
            ]
            windows = [window for window in self.loops.windows if window.factor == factor]
            read: dict[int | None, int] = {factor: size}
            for window in windows:
                reads = window.reach.reads(start, start + size)
                operands[window.operand] = self.read(operands[window.operand], window, reads)
                read[window.part] = length(reads)
            if number and reduction is not None:
                operands = [torch.zeros_like(each) if index in self.loops.added else each for index, each in enumerate(operands)]
            sizes = [read.get(index, whole) for index, whole in enumerate(self.sizes)]
            shapes = [tuple(math.prod(sizes[each] for each in dimension) for dimension in dimensions) for dimensions in self.loops.results]
            found = self.run(operands, sizes, [torch.empty(shape) for shape in shapes], frozenset({factor}))
            for window in windows:
                if window.reach.skip == 0:
                    continue  # the part is all that it makes
                found = [
                    _kept(each, dimensions, factor, window.reach.skipped(start), size)
                    for each, dimensions in zip(found, self.loops.results, strict=True)
                ]
            made.append(found)
            for got, shape in zip(made[-1], shapes, strict=True):
                if tuple(got.shape) != shape:
                    raise self.fail(f"{where}: a part has shape {tuple(got.shape)} instead of {shape}")
            start += size
        joined = []
        for number, dimensions in enumerate(self.loops.results):
            pieces = [results[number] for results in made]
            if reduction is None:
                joined.append(_joined(pieces, dimensions, self.sizes, factor, parts))
            else:
                joined.append(_COMBINED[reduction](pieces, parts))
        self.compare(joined, self.results, where)

    def read(self, operand: Tensor, window: Window, runs: Runs) -> Tensor:
        """What a window reads of a dimension, or of one of the factors in it."""
        if window.part is None:
            return take_runs(operand, window.dimension, runs, window.reach.fill)
        dimensions = self.loops.operands[window.operand]
        (place,) = _places(dimensions, window.part)
        unfolded = operand.reshape(_unfolded(dimensions, self.sizes, operand.shape))
        shape = [-1 if dimension == window.dimension else size for dimension, size in enumerate(operand.shape)]
        return take_runs(unfolded, place, runs, window.reach.fill).reshape(shape)

    def check_linear(self, operands: list[int]) -> None:
        """``f(2 x - 3 y) = 2 f(x) - 3 f(y)``, all operands of the set together."""
        generator = torch.Generator().manual_seed(0)
        others = [_like(each, generator) if index in operands else each for index, each in enumerate(self.operands)]
        mixed = [
            2 * one - 3 * other if index in operands else one for index, (one, other) in enumerate(zip(self.operands, others, strict=True))
        ]
        results = self.run(others, self.sizes, self.results)
        got = self.run(mixed, self.sizes, self.results)
        expected = [2 * one - 3 * other for one, other in zip(self.results, results, strict=True)]
        bounded = [one.isfinite() & other.isfinite() for one, other in zip(got, expected, strict=True)]  # others have overflown
        pairs = [(one[where], other[where]) for one, other, where in zip(got, expected, bounded, strict=True)]
        self.compare([one for one, _ in pairs], [other for _, other in pairs], f"linear in operands {operands}")

    def run(
        self, operands: Sequence[Tensor], sizes: Sequence[int], results: Sequence[Tensor], cut: frozenset[int] = frozenset()
    ) -> list[Tensor]:
        arguments = dict(self.arguments)
        if self.loops.localize is not None:
            parts, made = (tuple(tuple(each.shape) for each in tensors) for tensors in (operands, results))
            part = LocalCall(self.arguments, parts, made, tuple(sizes), cut)
            arguments.update(self.loops.localize(part))
        remaining = iter([each.clone() for each in operands])
        return _tensors(self.operator(**fx.map_arg(arguments, lambda _: next(remaining))))

    def compare(self, got: Sequence[Tensor], expected: Sequence[Tensor], where: str) -> None:
        tolerance = max(_TOLERANCE.get(tensor.dtype, 1e-12) for tensor in (*self.operands, *self.results))
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            if one.shape != other.shape:
                raise self.fail(f"{where}: result {number} has shape {tuple(one.shape)} instead of {tuple(other.shape)}")
            if self.random or "empty" in self.operator.name():
                continue
            scale = max(1.0, float(other.abs().max())) if other.numel() and other.dtype != torch.bool else 1.0
            try:
                torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale, equal_nan=True)
            except AssertionError as error:
                raise self.fail(f"{where}: result {number} is another: {error}") from None


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Tensor)]


def _partitions(size: int) -> list[tuple[int, ...]]:
    """Two parts and three, as uneven as the size allows."""
    found: list[tuple[int, ...]] = [(1, size - 1)]
    if size >= 3:
        found.append((1, (size - 1) // 2, size - 1 - (size - 1) // 2))
    if size >= 4:
        found.append((size - 2, 2))
    return found


def _unfolded(dimensions: Sequence[Dimension], sizes: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The shape with a dimension for each factor; one without factors keeps its size."""
    return [
        size
        for dimension, whole in zip(dimensions, shape, strict=True)
        for size in ([sizes[factor] for factor in dimension] if dimension else [whole])
    ]


def _places(dimensions: Sequence[Dimension], factor: int) -> list[int]:
    """Where a factor stands in the unfolded shape."""
    flat: list[int | None] = []
    for dimension in dimensions:
        flat += dimension or (None,)
    return [place for place, each in enumerate(flat) if each == factor]


def _cut(tensor: Tensor, dimensions: Sequence[Dimension], sizes: Sequence[int], factor: int, start: int, size: int) -> Tensor:
    places = _places(dimensions, factor)
    if not places:
        return tensor
    unfolded = tensor.reshape(_unfolded(dimensions, sizes, tensor.shape))
    for place in places:
        unfolded = unfolded.narrow(place, start, size)
    local = [size if index == factor else whole for index, whole in enumerate(sizes)]
    return unfolded.reshape(
        [
            math.prod(local[each] for each in dimension) if dimension else whole
            for dimension, whole in zip(dimensions, tensor.shape, strict=True)
        ]
    )


def _kept(result: Tensor, dimensions: Sequence[Dimension], factor: int, skipped: int, size: int) -> Tensor:
    """The part's own results, without those before and behind them."""
    (place,) = [index for index, each in enumerate(dimensions) if factor in each]
    return result.narrow(place, skipped, size)


def _joined(pieces: Sequence[Tensor], dimensions: Sequence[Dimension], sizes: Sequence[int], factor: int, parts: Sequence[int]) -> Tensor:
    (place,) = _places(dimensions, factor)
    unfolded = []
    for piece, part in zip(pieces, parts, strict=True):
        local = [part if index == factor else whole for index, whole in enumerate(sizes)]
        unfolded.append(piece.reshape(_unfolded(dimensions, local, piece.shape)))
    shape = [math.prod(sizes[each] for each in dimension) for dimension in dimensions]
    return torch.cat(unfolded, place).reshape(shape)


def _mean(pieces: Sequence[Tensor], parts: Sequence[int]) -> Tensor:
    return torch.stack([piece * part for piece, part in zip(pieces, parts, strict=True)]).sum(0) / sum(parts)


_COMBINED: Mapping[str, Callable[[Sequence[Tensor], Sequence[int]], Tensor]] = {
    "sum": lambda pieces, _: torch.stack(list(pieces)).sum(0),
    "mean": _mean,
    "max": lambda pieces, _: torch.stack(list(pieces)).amax(0),
    "min": lambda pieces, _: torch.stack(list(pieces)).amin(0),
}


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return torch.randint(-5, 5, tensor.shape, generator=generator).to(tensor.dtype)
