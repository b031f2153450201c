"""Compare a loss of all rows with the same loss put together from parts, on random results and the target at hand.

What is found is proof that the loss is not what it is said to be. What is not found proves nothing: a mask may be full today.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.model.losses.form import LossFunction
from partitioner.model.losses.reachable_state import undisturbed
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.microbatch import concatenate, microbatch_weights, split_batch, split_target, total
from passes.ir.graph import ModelGraph, Output
from passes.ir.program import at_batch, call_loss
from passes.ir.torch_private import pytree

__all__ = ["contradiction"]

_MOST_ENTRIES = 2**22
"""Of all results together; a larger batch is looked at in its first parts."""

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOOSE = 5e-2
"""Relative differences that are no rounding: of a dtype, of any other."""


def contradiction(
    graph: ModelGraph, loss_fn: LossFunction, target: Any, sizes: Sequence[int], reduction: str, device: torch.device
) -> str | None:
    """Return what shows that a loss is not the mean, or the sum, of its parts; None where nothing does.

    Args:
        graph: whose results it takes.
        target: for all rows.
        sizes: rows of each part.
        reduction: ``"mean"`` or ``"sum"``.
        device: where the loss is computed.
    """
    looked = _Look(graph, loss_fn, device)
    if any(output.combine not in ("concatenate", "same") for output in looked.outputs):
        return None
    batch, sizes = sum(sizes), looked.affordable(sizes)
    rows = sum(sizes)

    def first_rows(leaf: Tensor) -> Tensor:
        has_rows = leaf.dim() > 0 and leaf.shape[0] == batch
        return (leaf[:rows] if has_rows else leaf).detach().to(device)

    target = pytree.tree_map_only(Tensor, first_rows, target)
    generator = torch.Generator().manual_seed(0)
    for draw in (_mixture, _probabilities):
        results = [looked.draw(output, rows, draw, generator) for output in looked.outputs]
        with undisturbed(loss_fn, device):
            found = looked.compare(results, target, sizes, reduction)
        if found is not None:
            return found
    return None


class _Look:
    def __init__(self, graph: ModelGraph, loss_fn: LossFunction, device: torch.device) -> None:
        self.graph = graph
        self.loss_fn = loss_fn
        self.device = device
        self.outputs = [next(output for output in graph.outputs if output.node == name) for name in graph.returned]
        self.values = {node.name: node.meta["val"] for node in graph.graph.nodes if node.name in graph.returned}

    def affordable(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the first parts whose outputs are small enough to draw, at least two."""
        of_row = sum(int(torch.Size(self.shape(output, 1)).numel()) for output in self.outputs)
        count = len(sizes)
        while count > 2 and sum(sizes[:count]) * of_row > _MOST_ENTRIES:
            count -= 1
        return sizes[:count]

    def shape(self, output: Output, rows: int) -> list[int]:
        """Return the shape of an output for a number of samples: its batch dimension may have several entries a sample."""
        value = self.values[output.node]
        shape = [size_of(size) for size in value.shape]
        if output.combine == "concatenate" and output.batch_dim is not None:
            size = shape[output.batch_dim]
            of_row = size // self.graph.batch_size if isinstance(size, int) else int(size.subs(self.graph.batch, 1))
            shape[output.batch_dim] = rows * of_row
        return [int(size) for size in shape]

    def draw(
        self, output: Output, rows: int, draw: Callable[[Sequence[int], torch.Generator], Tensor], generator: torch.Generator
    ) -> Tensor:
        dtype = self.values[output.node].dtype
        drawn = draw(self.shape(output, rows), generator)
        return (drawn > 0 if dtype is torch.bool else drawn).to(self.device, dtype)

    def compare(self, results: Sequence[Tensor], target: Any, sizes: Sequence[int], reduction: str) -> str | None:
        """Return which of value and gradients differs between the loss of all samples and that of the parts; None if none does."""
        rows = sum(sizes)
        try:
            whole = self.loss(results, target, rows)
        except Exception:  # noqa: BLE001  a loss that fails on random results shows nothing
            return None
        dims = [output.batch_dim if output.combine == "concatenate" else None for output in self.outputs]
        cut = [[each] * len(sizes) if dim is None else split_batch(each, sizes, dim) for dim, each in zip(dims, results, strict=True)]
        parts = []
        for index, (part, size) in enumerate(zip(split_target(target, sizes), sizes, strict=True)):
            try:
                parts.append(self.loss([each[index] for each in cut], part, size))
            except Exception as error:  # noqa: BLE001  it takes all rows, and not these
                return f"on {size} of {rows} rows it fails: {type(error).__name__}: {error}"
        weights = microbatch_weights(sizes, reduction)
        together = total([part[0] * weight for part, weight in zip(parts, weights, strict=True)])
        tolerance = max(_TOLERANCES.get(each.dtype, _LOOSE) for each in (whole[0], *results) if each.is_floating_point())
        if _differ(whole[0], together, tolerance):
            values = f"{float(whole[0]):.4g} on all {rows} rows, and {float(together):.4g} put together from {len(sizes)} parts"
            return f"for random outputs it is {values}"
        for place, dim in enumerate(dims):
            gradients = [part[1][place] * weight for part, weight in zip(parts, weights, strict=True)]
            if _differ(whole[1][place], total(gradients) if dim is None else concatenate(gradients, dim), tolerance):
                return "for random outputs its gradients on all rows are not those of the parts put together"
        return None

    def loss(self, results: Sequence[Tensor], target: Any, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and its gradients of all outputs."""
        with torch.enable_grad():
            given = [each.detach().requires_grad_() if each.is_floating_point() else each for each in results]
            by_node = {output.node: each for output, each in zip(self.outputs, given, strict=True)}
            leaves = [at_batch(o.constant, rows) if o.node is None else by_node[o.node] for o in self.graph.outputs]
            loss = call_loss(pytree.tree_unflatten(leaves, self.graph.output_tree), target, self.loss_fn, self.graph.autocast)
        roots = [each for each in given if each.requires_grad]
        found = torch.autograd.grad(loss, roots, allow_unused=True) if loss.requires_grad else [None] * len(roots)
        gradients = iter(found)
        of_all = [next(gradients) if each.requires_grad else None for each in given]
        return loss.detach(), [torch.zeros_like(each) if g is None else g for each, g in zip(given, of_all, strict=True)]


def _mixture(shape: Sequence[int], generator: torch.Generator) -> Tensor:
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
