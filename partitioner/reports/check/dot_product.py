"""One number of all results of a model: the dot product with tensors drawn once.

Its gradients reach every result with another weight on every element, so that no two mistakes cancel. It is written as a loss for
``train_step``: a mean over the batch, cut with its target into microbatches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partitioner.reports.check.compare import largest_magnitude
from passes.ir.graph import Output
from passes.ir.torch_private import pytree

__all__ = ["DotProduct"]

_SEED = 20


class DotProduct:
    """A loss that is linear in every differentiable result.

    Args:
        outputs: what the model returns.
        leaves: the values of one call, whole batch: those that require gradients are taken.
        batch: rows of the batch.

    Attributes:
        target: what to pass to ``train_step`` beside it.
        is_empty: whether no result is differentiable.
        computed_in: the least precise dtype of the differentiable results: the number, though a double, is no more precise.
        scale: the largest magnitude of those results.
    """

    def __init__(self, outputs: tuple[Output, ...], leaves: list[Any], batch: int) -> None:
        self.outputs = outputs
        self.batch = batch
        generator = torch.Generator().manual_seed(_SEED)
        weights = [self._weights(output, leaf, generator) for output, leaf in zip(outputs, leaves, strict=True)]
        taken = [leaf for leaf, weight in zip(leaves, weights, strict=True) if weight is not None]
        self.is_empty = not taken
        self.computed_in = max((leaf.dtype for leaf in taken), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
        self.scale = max(map(largest_magnitude, taken), default=0.0)
        self.target = {"rows": torch.arange(batch), "weights": weights}

    def _weights(self, output: Output, leaf: Any, generator: torch.Generator) -> Tensor | None:
        """Normally distributed, the batch in front where it is cut, a dimension of 1 in front where it is not."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return None
        weights: Tensor = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)
        if output.combine != "concatenate" or output.batch_dim is None:
            return weights.unsqueeze(0)
        rows_first = weights.movedim(output.batch_dim, 0)
        return rows_first.reshape(self.batch, rows_first.shape[0] // self.batch, *rows_first.shape[1:])

    def __call__(self, result: Any, target: Any) -> Tensor:
        """The dot product over the rows of ``target``; its mean over microbatches, weighted by rows, is that of the batch."""
        rows = target["rows"].shape[0]
        parts = []
        for output, leaf, weights in zip(self.outputs, pytree.tree_leaves(result), target["weights"], strict=True):
            if weights is None:
                continue
            cut = output.combine == "concatenate" and output.batch_dim is not None
            placed = weights.flatten(0, 1).movedim(0, output.batch_dim) if cut else weights.squeeze(0)
            product = (leaf * placed.to(leaf.device)).sum().real.double()
            parts.append(product / rows * self.batch if output.combine in ("concatenate", "sum") else product)
        return torch.stack([part.to(parts[0].device) for part in parts]).sum()
