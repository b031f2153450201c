"""A loss over all results of a model: their dot product with random weights.

Every element of a result has a gradient of its own, so that errors do not cancel. The loss is one for ``train_step``: a mean over the
batch, whose target is split into microbatches with the inputs.
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
        leaves: the results of one call on the whole batch; those that require gradients enter the loss.
        batch: rows of the batch.

    Attributes:
        target: the ``target`` of ``train_step``: the weights.
        is_empty: whether no result is differentiable.
        computed_in: the least precise dtype of the differentiable results: the loss, though a double, is no more precise.
        scale: the largest magnitude of the differentiable results.
    """

    def __init__(self, outputs: tuple[Output, ...], leaves: list[Any], batch: int) -> None:
        self.outputs = outputs
        self.batch = batch
        generator = torch.Generator().manual_seed(_SEED)
        weights = [self._weights(output, leaf, generator) for output, leaf in zip(outputs, leaves, strict=True)]
        weighted = [leaf for leaf, weight in zip(leaves, weights, strict=True) if weight is not None]
        self.is_empty = not weighted
        self.computed_in = max((leaf.dtype for leaf in weighted), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
        self.scale = max(map(largest_magnitude, weighted), default=0.0)
        self.target = {"rows": torch.arange(batch), "weights": weights}

    def _weights(self, output: Output, leaf: Any, generator: torch.Generator) -> Tensor | None:
        """Draw the weights of a result; None if it is not differentiable.

        Dimension 0 is the batch if microbatches split the result (``(batch, elements of a row, ...)``), else it has size 1.
        """
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return None
        weights: Tensor = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)
        if output.combine != "concatenate" or output.batch_dim is None:
            return weights.unsqueeze(0)
        rows_first = weights.movedim(output.batch_dim, 0)
        return rows_first.reshape(self.batch, rows_first.shape[0] // self.batch, *rows_first.shape[1:])

    def __call__(self, result: Any, target: Any) -> Tensor:
        """Return the dot product over the rows of ``target``; its mean over microbatches, weighted by rows, is that of the batch."""
        rows = target["rows"].shape[0]
        products = []
        for output, leaf, weights in zip(self.outputs, pytree.tree_leaves(result), target["weights"], strict=True):
            if weights is None:
                continue
            has_rows = output.combine == "concatenate" and output.batch_dim is not None
            as_result = weights.flatten(0, 1).movedim(0, output.batch_dim) if has_rows else weights.squeeze(0)
            product = (leaf * as_result.to(leaf.device)).sum().real.double()
            products.append(product / rows * self.batch if output.combine in ("concatenate", "sum") else product)
        return torch.stack([product.to(products[0].device) for product in products]).sum()
