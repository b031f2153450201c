"""Compare a loss of all rows with the same loss combined from parts, on random results and the target at hand.

A difference proves that the loss is not the stated reduction. Equality proves nothing: the mask of this target may happen to be full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.model.losses.form import LossFunction
from partitioner.model.losses.proof import entries_per_row, fake_value, has_rows
from partitioner.model.losses.reachable_state import preserve_state
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.microbatch import concatenate, microbatch_weights, split_batch, split_target, total
from passes.ir.graph import ModelGraph, Output
from passes.ir.program import at_batch, call_loss
from passes.ir.torch_private import pytree

__all__ = ["contradiction"]

_MOST_ENTRIES = 2**22
"""Limit for all results together; of a larger batch the first parts are compared."""

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOOSE = 5e-2
"""Largest relative difference that counts as rounding, by dtype; ``_LOOSE`` for any other dtype."""


def contradiction(
    graph: ModelGraph, loss_fn: LossFunction, target: Any, sizes: Sequence[int], reduction: str, device: torch.device
) -> str | None:
    """Return how values contradict that a loss is the mean, or the sum, of its parts; None if they do not.

    Args:
        graph: the model; the loss takes its results.
        target: for all rows.
        sizes: rows of each part.
        reduction: ``"mean"`` or ``"sum"``.
        device: where the loss is computed.
    """
    comparison = _Comparison(graph, loss_fn, device)
    if any(output.combine not in ("concatenate", "same") for output in comparison.outputs):
        return None
    batch, sizes = sum(sizes), comparison.affordable_parts(sizes)
    rows = sum(sizes)

    def first_rows(leaf: Tensor) -> Tensor:
        return (leaf[:rows] if has_rows(leaf, batch) else leaf).detach().to(device)

    target = pytree.tree_map_only(Tensor, first_rows, target)
    generator = torch.Generator().manual_seed(0)
    for distribution in (_scaled_normal, _probabilities):
        results = [comparison.draw(output, rows, distribution, generator) for output in comparison.outputs]
        with preserve_state(loss_fn, device):
            difference = comparison.difference(results, target, sizes, reduction)
        if difference is not None:
            return difference
    return None


class _Comparison:
    """Computes a loss, and its gradients, from random results of a model: of all rows at once, and of parts."""

    def __init__(self, graph: ModelGraph, loss_fn: LossFunction, device: torch.device) -> None:
        self.graph = graph
        self.loss_fn = loss_fn
        self.device = device
        self.outputs = [next(output for output in graph.loss_results if output.node == name) for name in graph.loss_nodes]

    def affordable_parts(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the first parts whose outputs are small enough to draw, at least two."""
        size_of_row = sum(int(torch.Size(self.shape(output, 1)).numel()) for output in self.outputs)
        count = len(sizes)
        while count > 2 and sum(sizes[:count]) * size_of_row > _MOST_ENTRIES:
            count -= 1
        return sizes[:count]

    def shape(self, output: Output, rows: int) -> list[int]:
        """Return the shape of an output for a number of samples: its batch dimension may have several entries a sample."""
        shape = [size_of(size) for size in fake_value(self.graph, output).shape]
        if output.combine == "concatenate" and output.batch_dim is not None:
            shape[output.batch_dim] = rows * entries_per_row(self.graph, output)
        return [int(size) for size in shape]

    def draw(
        self, output: Output, rows: int, distribution: Callable[[Sequence[int], torch.Generator], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Draw a random value of an output, in its dtype."""
        dtype = fake_value(self.graph, output).dtype
        drawn = distribution(self.shape(output, rows), generator)
        return (drawn > 0 if dtype is torch.bool else drawn).to(self.device, dtype)

    def difference(self, results: Sequence[Tensor], target: Any, sizes: Sequence[int], reduction: str) -> str | None:
        """Return how the loss of all rows, or a gradient, differs from its combination from the parts; None if nothing does."""
        rows = sum(sizes)
        try:
            loss, gradients = self.loss_and_gradients(results, target, rows)
        except Exception:  # noqa: BLE001  a loss that fails on random results shows nothing
            return None
        dims = [output.batch_dim if output.combine == "concatenate" else None for output in self.outputs]
        split = [[value] * len(sizes) if dim is None else split_batch(value, sizes, dim) for dim, value in zip(dims, results, strict=True)]
        parts = []
        for index, (part_target, size) in enumerate(zip(split_target(target, sizes), sizes, strict=True)):
            try:
                parts.append(self.loss_and_gradients([of_parts[index] for of_parts in split], part_target, size))
            except Exception as error:  # noqa: BLE001  it takes all rows, and not these
                return f"on {size} of {rows} rows it fails: {type(error).__name__}: {error}"
        weights = microbatch_weights(sizes, reduction)
        combined = total([part_loss * weight for (part_loss, _), weight in zip(parts, weights, strict=True)])
        tolerance = max(_TOLERANCES.get(value.dtype, _LOOSE) for value in (loss, *results) if value.is_floating_point())
        if _differ(loss, combined, tolerance):
            values = f"{float(loss):.4g} on all {rows} rows, and {float(combined):.4g} put together from {len(sizes)} parts"
            return f"for random outputs it is {values}"
        for index, dim in enumerate(dims):
            weighted = [part_gradients[index] * weight for (_, part_gradients), weight in zip(parts, weights, strict=True)]
            if _differ(gradients[index], total(weighted) if dim is None else concatenate(weighted, dim), tolerance):
                return "for random outputs its gradients on all rows are not those of the parts put together"
        return None

    def loss_and_gradients(self, results: Sequence[Tensor], target: Any, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and its gradient with respect to each result: zeros where there is none."""
        with torch.enable_grad():
            inputs = [value.detach().requires_grad_() if value.is_floating_point() else value for value in results]
            by_node = {output.node: value for output, value in zip(self.outputs, inputs, strict=True)}
            leaves = [at_batch(o.constant, rows) if o.node is None else by_node[o.node] for o in self.graph.loss_results]
            loss = call_loss(pytree.tree_unflatten(leaves, self.graph.loss_tree), target, self.loss_fn, self.graph.autocast)
        gradients = [torch.zeros_like(value) for value in inputs]
        tracked = [index for index, value in enumerate(inputs) if value.requires_grad]
        if loss.requires_grad:
            computed: Sequence[Tensor | None] = torch.autograd.grad(loss, [inputs[index] for index in tracked], allow_unused=True)
            for index, gradient in zip(tracked, computed, strict=True):
                if gradient is not None:
                    gradients[index] = gradient
        return loss.detach(), gradients


def _scaled_normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw normal numbers, a quarter of them zero, with a different scale for each sample."""
    drawn = torch.randn(list(shape), generator=generator, dtype=torch.float64)
    if shape:
        drawn *= torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator, dtype=torch.float64) * 3 + 0.1
    return drawn * (torch.rand(list(shape), generator=generator) > 0.25)


def _probabilities(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw probabilities: positive numbers with sum 1 along the last dimension, for losses with a logarithm."""
    drawn = torch.rand(list(shape), generator=generator, dtype=torch.float64) + 0.01
    return drawn / drawn.sum(-1, keepdim=True) if shape else drawn


def _differ(whole: Tensor, parts: Tensor, tolerance: float) -> bool:
    """Return whether two values differ by more than rounding; two NaN do not."""
    if not whole.isfinite().all():
        return False
    if not parts.isfinite().all():
        return True
    scale = whole.double().abs().max()
    return bool((whole.double() - parts.double()).abs().max() > tolerance * scale + 1e-12)
