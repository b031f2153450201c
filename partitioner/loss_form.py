"""Look at a loss once, without computing anything: which of the model's results it depends on, and its dtype.

A parameter that the loss does not depend on gets no gradient in eager PyTorch (None, not zero: optimizers treat the two differently).
So the backward is lowered for exactly those results that the loss depends on.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from passes.ir.graph import ModelGraph
from passes.ir.program import at_batch, call_loss
from passes.size_expression import size_of

__all__ = ["LossDependence", "loss_dependence", "loss_key"]

LossFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class LossDependence:
    """What a loss looks like from outside.

    Attributes:
        outputs: nodes of the model's results that the loss depends on differentiably.
        dtype: of the loss.
        own: the node of the model's results that is the loss itself, when one is.
    """

    outputs: frozenset[str]
    dtype: torch.dtype
    own: str | None


def loss_key(loss_fn: LossFunction | None) -> Hashable:
    """Equal for functions that are the same code over alike values: a lambda written inside a loop is looked at once.

    Numbers and texts that a function closes over count by value, for they may switch parts of a loss on and off; tensors by their type.
    """
    if isinstance(loss_fn, types.FunctionType):
        return loss_fn.__code__, tuple(_closed_over(cell) for cell in loss_fn.__closure__ or ())
    return id(loss_fn), type(loss_fn)


def _closed_over(cell: types.CellType) -> Hashable:
    value = cell.cell_contents
    if isinstance(value, bool | int | float | str | None):
        return value
    return loss_key(value) if isinstance(value, types.FunctionType) else f"{type(value).__module__}.{type(value).__qualname__}"


def loss_dependence(graph: ModelGraph, requiring: frozenset[str], loss_fn: LossFunction | None, target: Any, batch: int) -> LossDependence:
    """Call the loss on fake results (where it reads values: on zeros) and ask autograd which of them it reached.

    Args:
        requiring: nodes whose values autograd tracks.
        batch: rows of the batch.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake_target = pytree.tree_map_only(Tensor, mode.from_tensor, target)
            return _dependence(graph, requiring, loss_fn, fake_target, batch, torch.empty)
    except Exception:  # noqa: BLE001  whatever a user's loss raises on fake tensors, it is asked again with real ones
        # A loss that reads values (an `if` on a tensor) has none to read in a fake tensor.
        return _dependence(graph, requiring, loss_fn, target, batch, torch.zeros)


def _dependence(
    graph: ModelGraph, requiring: frozenset[str], loss_fn: LossFunction | None, target: Any, batch: int, make: Callable[..., Tensor]
) -> LossDependence:
    nodes = {node.name: node for node in graph.graph.nodes}
    leaves: list[Any] = []
    tracked: dict[str, Tensor] = {}
    for output in graph.outputs:
        if output.node is None:
            leaves.append(at_batch(output.constant, batch))
            continue
        if output.node not in tracked:
            value = nodes[output.node].meta["val"]
            shape = [_concrete(size, graph, batch) for size in value.shape]
            tracked[output.node] = make(shape, dtype=value.dtype, device=_device(value, target), requires_grad=output.node in requiring)
        leaves.append(tracked[output.node])
    with torch.enable_grad():
        loss = call_loss(pytree.tree_unflatten(leaves, graph.output_tree), target, loss_fn, graph.autocast)
    own = next((name for name, tensor in tracked.items() if tensor is loss), None)
    roots = {name: tensor for name, tensor in tracked.items() if tensor.requires_grad}
    if not roots or not loss.requires_grad:
        return LossDependence(frozenset(), loss.dtype, own)
    found: Sequence[Tensor | None] = torch.autograd.grad(loss, list(roots.values()), allow_unused=True)
    reached = frozenset(name for name, gradient in zip(roots, found, strict=True) if gradient is not None)
    return LossDependence(reached, loss.dtype, own)


def _concrete(size: int | torch.SymInt, graph: ModelGraph, batch: int) -> int:
    expression = size_of(size)
    return expression if isinstance(expression, int) else int(expression.subs(graph.batch, batch))


def _device(value: Tensor, target: Any) -> torch.device:
    tensors = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
    return tensors[0].device if tensors else value.device
