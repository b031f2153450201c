"""Prove a rule by execution: cut real operands along every factor, run the parts, combine their results, and compare with the whole call.

proved = prove_rule(torch.ops.mine.gated.default, torch.randn(4, 6), torch.randn(6))
proved.factors       ("rows", "columns")
"""

from __future__ import annotations

import itertools
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

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""Largest difference, relative to max(1, largest element), because sums in another order differ; 1e-12 for other types (float64)."""


@dataclass(frozen=True)
class Proof:
    """The parts of a rule that were proved for one call.

    Attributes:
        loops: of the call, by its rule.
        factors: names of the factors that were cut.
        linear: the sets of operands in which linearity was checked.
    """

    loops: Loops
    factors: tuple[str, ...]
    linear: tuple[frozenset[int], ...]


def prove_rule(operator: OpOverload, /, *args: Any, **kwargs: Any) -> Proof:
    """Check by execution everything that the rule of an operator says of one call.

    Args:
        operator: an overload that has a rule.
        args: real arguments; float64 where numbers are not integers.
        kwargs: likewise.

    Raises:
        VerificationError: there is no rule for the call, or the combined parts differ from the whole call.
    """
    node = call_node(operator, *args, **kwargs)
    loops = loops_of(node)
    if loops is None:
        raise VerificationError(f"{operator} has no rule for this call")
    return _Prover(node, loops).prove()


def call_node(operator: OpOverload, /, *args: Any, **kwargs: Any) -> fx.Node:
    """Return a node of a new graph that calls an operator on real tensors; every ``meta["val"]`` is the tensor itself."""
    graph = fx.Graph()

    def to_placeholders(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return [to_placeholders(item) for item in value] if isinstance(value, list | tuple) else value
        node = graph.placeholder("operand")
        node.meta["val"] = value
        return node

    node_args = tuple(to_placeholders(value) for value in args)
    node = graph.call_function(operator, node_args, {name: to_placeholders(value) for name, value in kwargs.items()})
    copied_args, copied_kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
    node.meta["val"] = operator(*copied_args, **copied_kwargs)
    return node


class _Prover:
    """Checks the loops of one call, a node whose ``meta["val"]`` are real tensors."""

    def __init__(self, node: fx.Node, loops: Loops) -> None:
        assert isinstance(node.target, OpOverload)
        self.operator, self.loops = node.target, loops
        self.arguments = bound_arguments(node)
        self.operands: list[Tensor] = [operand.meta["val"] for operand in node_leaves(self.arguments)]
        self.results = _tensors(node.meta["val"])
        self.sizes = [int(factor.size) for factor in loops.factors]
        self.random = draws_random_numbers(self.operator)

    def error(self, problem: str) -> VerificationError:
        return VerificationError(f"{self.operator}: {problem}", remedy=f"its loops are {self.loops}")

    def prove(self) -> Proof:
        """Check sizes, cuts and linearity; factors with windows that need a decomposition (``Reach.written``) are not cut."""
        self.check_sizes()
        decomposed = {window.factor for window in self.loops.windows if window.reach.written}
        factors = [
            index
            for index, factor in enumerate(self.loops.factors)
            if factor.reduction != "whole" and self.sizes[index] > 1 and index not in decomposed
        ]
        for factor in factors:
            for parts in _partitions(self.sizes[factor]):
                self.check_cut(factor, parts)
        for operands in self.loops.linear:
            self.check_linear(sorted(operands))
        if self.loops.unread:
            changed = [torch.full_like(tensor, 3) if index in self.loops.unread else tensor for index, tensor in enumerate(self.operands)]
            self.compare(self.run(changed, self.sizes, self.results), self.results, "an operand is read")
        return Proof(self.loops, tuple(self.loops.factors[factor].name for factor in factors), self.loops.linear)

    def check_sizes(self) -> None:
        """Check that the factors of each dimension multiply to its size; an operand's dimension without factors may be broadcast."""
        pairs = [*zip(self.loops.operands, self.operands, strict=True), *zip(self.loops.results, self.results, strict=True)]
        for number, (dimensions, tensor) in enumerate(pairs):
            is_result = number >= len(self.operands)
            if len(dimensions) != tensor.dim():
                raise self.error(f"tensor {number} has {tensor.dim()} dimensions, its loops {len(dimensions)}")
            for dimension, size in zip(dimensions, tensor.shape, strict=True):
                product = math.prod(self.sizes[factor] for factor in dimension)
                if product != size and (dimension or is_result):
                    raise self.error(f"a dimension of size {size} has factors of {product}")

    def check_cut(self, factor: int, parts: Sequence[int]) -> None:
        """Cut a factor into parts of these sizes, run each, and compare the combined results with those of the whole call."""
        name, reduction = self.loops.factors[factor].name, self.loops.factors[factor].reduction
        where = f"cut along {name} into {', '.join(map(str, parts))}"
        starts = itertools.accumulate(parts[:-1], initial=0)
        results_of_parts = [self.run_part(factor, start, size, where) for start, size in zip(starts, parts, strict=True)]
        combined = []
        for number, dimensions in enumerate(self.loops.results):
            pieces = [results[number] for results in results_of_parts]
            if reduction is None:
                combined.append(_concat(pieces, dimensions, self.sizes, factor, parts))
            else:
                combined.append(_COMBINE[reduction](pieces, parts))
        self.compare(combined, self.results, where)

    def run_part(self, factor: int, start: int, size: int, where: str) -> list[Tensor]:
        """Run ``size`` steps of a factor from ``start``, and check the shapes of their results."""
        operands = [
            _cut(tensor, dimensions, self.sizes, factor, start, size)
            for tensor, dimensions in zip(self.operands, self.loops.operands, strict=True)
        ]
        windows = [window for window in self.loops.windows if window.factor == factor]
        local_sizes: dict[int | None, int] = {factor: size}
        for window in windows:
            reads = window.reach.reads(start, start + size)
            operands[window.operand] = self.take_reads(operands[window.operand], window, reads)
            local_sizes[window.part] = length(reads)
        if start > 0 and self.loops.factors[factor].reduction is not None:  # the first part alone adds the bias
            operands = [torch.zeros_like(tensor) if index in self.loops.added else tensor for index, tensor in enumerate(operands)]
        sizes = [local_sizes.get(index, whole) for index, whole in enumerate(self.sizes)]
        shapes = [_folded_shape(dimensions, sizes) for dimensions in self.loops.results]
        results = self.run(operands, sizes, [torch.empty(shape) for shape in shapes], frozenset({factor}))
        for window in windows:
            if window.reach.skip != 0:  # the op gives more results than those of the part
                skipped = window.reach.skipped(start)
                pairs = zip(results, self.loops.results, strict=True)
                results = [_narrow(result, dimensions, factor, skipped, size) for result, dimensions in pairs]
        for result, shape in zip(results, shapes, strict=True):
            if tuple(result.shape) != shape:
                raise self.error(f"{where}: a part has shape {tuple(result.shape)} instead of {shape}")
        return results

    def take_reads(self, operand: Tensor, window: Window, runs: Runs) -> Tensor:
        """Return the elements that a window reads of a dimension, or of one of the factors in it."""
        if window.part is None:
            return take_runs(operand, window.dimension, runs, window.reach.fill)
        dimensions = self.loops.operands[window.operand]
        (position,) = _unfolded_positions(dimensions, window.part)
        unfolded = operand.reshape(_unfolded_shape(dimensions, self.sizes, operand.shape))
        shape = [-1 if dimension == window.dimension else size for dimension, size in enumerate(operand.shape)]
        return take_runs(unfolded, position, runs, window.reach.fill).reshape(shape)

    def check_linear(self, operands: list[int]) -> None:
        """Check ``f(2 x - 3 y) = 2 f(x) - 3 f(y)``, where ``x`` are the operands of the set, and ``y`` random ones in their place."""
        generator = torch.Generator().manual_seed(0)
        others = [_random_like(tensor, generator) if index in operands else tensor for index, tensor in enumerate(self.operands)]
        mixed = [2 * x - 3 * y if index in operands else x for index, (x, y) in enumerate(zip(self.operands, others, strict=True))]
        results_of_others = self.run(others, self.sizes, self.results)
        results_of_mixed = self.run(mixed, self.sizes, self.results)
        got, expected = list[Tensor](), list[Tensor]()
        for of_x, of_y, of_mixed in zip(self.results, results_of_others, results_of_mixed, strict=True):
            linear_result = 2 * of_x - 3 * of_y
            finite = of_mixed.isfinite() & linear_result.isfinite()  # both may overflow
            got.append(of_mixed[finite])
            expected.append(linear_result[finite])
        self.compare(got, expected, f"linear in operands {operands}")

    def run(
        self, operands: Sequence[Tensor], sizes: Sequence[int], results: Sequence[Tensor], cut: frozenset[int] = frozenset()
    ) -> list[Tensor]:
        """Run the call on other operands, given the size of each factor, tensors with the shapes of the results, and the cut factors."""
        arguments = dict(self.arguments)
        if self.loops.localize is not None:
            operand_shapes, result_shapes = (tuple(tuple(tensor.shape) for tensor in tensors) for tensors in (operands, results))
            part = LocalCall(self.arguments, operand_shapes, result_shapes, tuple(sizes), cut)
            arguments.update(self.loops.localize(part))
        remaining = iter([tensor.clone() for tensor in operands])
        return _tensors(self.operator(**fx.map_arg(arguments, lambda _: next(remaining))))

    def compare(self, results: Sequence[Tensor], expected: Sequence[Tensor], where: str) -> None:
        """Raise if results differ; of random ops and of ``empty``, only shapes are compared."""
        tolerance = max(_TOLERANCE.get(tensor.dtype, 1e-12) for tensor in (*self.operands, *self.results))
        for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            if got.shape != wanted.shape:
                raise self.error(f"{where}: result {number} has shape {tuple(got.shape)} instead of {tuple(wanted.shape)}")
            if self.random or "empty" in self.operator.name():
                continue
            scale = max(1.0, float(wanted.abs().max())) if wanted.numel() and wanted.dtype != torch.bool else 1.0
            try:
                torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * scale, equal_nan=True)
            except AssertionError as error:
                raise self.error(f"{where}: result {number} differs: {error}") from None


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors among the results of a call: one, or a list or tuple."""
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, Tensor)]


def _partitions(size: int) -> list[tuple[int, ...]]:
    """Return uneven partitions of a size into two and three parts: (1, 4), (1, 2, 2) and (3, 2) for 5."""
    partitions: list[tuple[int, ...]] = [(1, size - 1)]
    if size >= 3:
        partitions.append((1, (size - 1) // 2, size - 1 - (size - 1) // 2))
    if size >= 4:
        partitions.append((size - 2, 2))
    return partitions


def _unfolded_shape(dimensions: Sequence[Dimension], sizes: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return a shape with a dimension for each factor; a dimension without factors keeps its size."""
    unfolded: list[int] = []
    for dimension, size in zip(dimensions, shape, strict=True):
        unfolded += [sizes[factor] for factor in dimension] if dimension else [size]
    return unfolded


def _folded_shape(dimensions: Sequence[Dimension], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor from the sizes of all factors."""
    return tuple(math.prod(sizes[factor] for factor in dimension) for dimension in dimensions)


def _unfolded_positions(dimensions: Sequence[Dimension], factor: int) -> list[int]:
    """Return the dimensions of the unfolded shape that a factor runs over."""
    factors: list[int | None] = []
    for dimension in dimensions:
        factors += dimension or (None,)
    return [position for position, other in enumerate(factors) if other == factor]


def _cut(tensor: Tensor, dimensions: Sequence[Dimension], sizes: Sequence[int], factor: int, start: int, size: int) -> Tensor:
    """Return the part of an operand for ``size`` steps of a factor from ``start``; all of it if the operand does not have the factor."""
    positions = _unfolded_positions(dimensions, factor)
    if not positions:
        return tensor
    unfolded = tensor.reshape(_unfolded_shape(dimensions, sizes, tensor.shape))
    for position in positions:
        unfolded = unfolded.narrow(position, start, size)
    local = [size if index == factor else whole for index, whole in enumerate(sizes)]
    folded = _folded_shape(dimensions, local)
    return unfolded.reshape([new if dimension else old for dimension, new, old in zip(dimensions, folded, tensor.shape, strict=True)])


def _narrow(result: Tensor, dimensions: Sequence[Dimension], factor: int, skipped: int, size: int) -> Tensor:
    """Return the results of a part alone, without those before and after it."""
    (position,) = [position for position, dimension in enumerate(dimensions) if factor in dimension]
    return result.narrow(position, skipped, size)


def _concat(pieces: Sequence[Tensor], dimensions: Sequence[Dimension], sizes: Sequence[int], factor: int, parts: Sequence[int]) -> Tensor:
    """Concatenate results of parts along a factor, also within a dimension of several factors."""
    (position,) = _unfolded_positions(dimensions, factor)
    unfolded = []
    for piece, part in zip(pieces, parts, strict=True):
        local = [part if index == factor else whole for index, whole in enumerate(sizes)]
        unfolded.append(piece.reshape(_unfolded_shape(dimensions, local, piece.shape)))
    return torch.cat(unfolded, position).reshape(_folded_shape(dimensions, sizes))


def _weighted_mean(pieces: Sequence[Tensor], parts: Sequence[int]) -> Tensor:
    return torch.stack([piece * part for piece, part in zip(pieces, parts, strict=True)]).sum(0) / sum(parts)


_COMBINE: Mapping[str, Callable[[Sequence[Tensor], Sequence[int]], Tensor]] = {
    "sum": lambda pieces, _: torch.stack(list(pieces)).sum(0),
    "mean": _weighted_mean,
    "max": lambda pieces, _: torch.stack(list(pieces)).amax(0),
    "min": lambda pieces, _: torch.stack(list(pieces)).amin(0),
}


def _random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return torch.randint(-5, 5, tensor.shape, generator=generator).to(tensor.dtype)
