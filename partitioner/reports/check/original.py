"""Call the original with the current weights of the partitioned model; record results, buffers and gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.reports.check.compare import largest_magnitude
from partitioner.runtime.arguments import reorder_keywords
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph, Output, without_autocast
from passes.ir.program import call_loss
from passes.ir.torch_private import pytree

SEED = 2024
"""Seed of the random numbers that both models draw."""


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one call, copied so that calls share no memory.

    Attributes:
        args, kwargs: the arguments.
        requiring: input name -> the tensor of the arguments that requires a gradient.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    requiring: Mapping[str, Tensor]


@dataclass(frozen=True)
class Gradients:
    """A loss and its gradients.

    Attributes:
        loss: the loss of the whole batch.
        parameters: original name -> gradient, None where there is none.
        inputs: input name -> gradient.
    """

    loss: Tensor
    parameters: Mapping[str, Tensor | None]
    inputs: Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Reference:
    """The results of the original.

    Attributes:
        outputs: leaves of its result.
        buffers: name -> value after the call.
        objective: a loss of all results; None if no result is differentiable.
        gradients: gradients of the objective.
        own_gradients: gradients of the loss that the model itself returns; None if it returns none.
    """

    outputs: list[Any]
    buffers: Mapping[str, Tensor]
    objective: _DotProduct | None
    gradients: Gradients | None
    own_gradients: Gradients | None


def fresh_call(graph: ModelGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device | None = None) -> ModelCall:
    """Copy the arguments of a call, to a device if one is given; copies require gradients where the arguments do."""

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().to(device or leaf.device).requires_grad_(leaf.requires_grad)

    leaves, tree = pytree.tree_flatten((args, reorder_keywords(graph, dict(kwargs))))
    copies = [copy_leaf(leaf) for leaf in leaves]
    named = [(leaf.name, tensor) for leaf, tensor in zip(graph.inputs, copies, strict=True)]
    requiring = {name: tensor for name, tensor in named if isinstance(tensor, Tensor) and tensor.requires_grad}
    new_args, new_kwargs = pytree.tree_unflatten(copies, tree)
    return ModelCall(new_args, new_kwargs, requiring)


def run_original(
    original: nn.Module,
    graph: ModelGraph,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch: int,
) -> Reference:
    """Call a copy of the original, so that the call changes neither buffers nor attributes of the original.

    Args:
        tensors: parameters and buffers by original name.
        batch: rows of the batch.

    Raises:
        ConfigError: the original cannot be copied.
    """
    model = _copy(original, graph, tensors)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    call = fresh_call(graph, args, kwargs, device)
    torch.manual_seed(SEED)
    with without_autocast() if graph.autocast is None else graph.autocast.enabled():
        result = model(*call.args, **call.kwargs)
    outputs = pytree.tree_leaves(result)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    objective = _DotProduct(graph.leaves, outputs, batch)
    if objective.is_empty:
        return Reference(outputs, buffers, None, None, None)
    own_loss = _own_loss(result)
    gradients = _gradients(objective(result, objective.target), model, call)
    return Reference(outputs, buffers, objective, gradients, None if own_loss is None else _gradients(own_loss, model, call))


def _copy(original: nn.Module, graph: ModelGraph, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy the model with the given parameters and buffers, by name; ``deepcopy`` replaces a tied tensor wherever it occurs."""
    memo: dict[int, Any] = {}
    for name, parameter in original.named_parameters():
        replacement = _on_device_of(parameter, tensors[name])
        memo[id(parameter)] = nn.Parameter(replacement, requires_grad=parameter.requires_grad)
    for name, buffer in original.named_buffers():
        memo[id(buffer)] = _on_device_of(buffer, tensors[name]) if name in tensors else buffer.clone()
    try:
        model = copy.deepcopy(original, memo)
    except Exception as error:
        raise ConfigError(
            f"the original cannot be copied to be compared with: {error}", remedy="compare pm(x) with the model's own result yourself"
        ) from error
    return model if model.training == graph.training else model.train(graph.training)


def _on_device_of(original: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor to the device of the original; if that is the meta device, to its own device."""
    copied = tensor.detach().clone()
    return copied if original.is_meta else copied.to(original.device)


def _own_loss(result: Any) -> Tensor | None:
    """Return the loss that the model itself returns; None if it returns none, or none that is differentiable."""
    try:
        loss = call_loss(result, None, None)
    except ConfigError:
        return None
    return loss if loss.requires_grad else None


def _gradients(loss: Tensor, model: nn.Module, call: ModelCall) -> Gradients:
    """Differentiate a loss by the model's trainable parameters and the inputs that require gradients; keep the autograd graph."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    leaves = [*parameters.values(), *call.requiring.values()]
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) if leaves else ()
    of_parameters = dict(zip(parameters, gradients[: len(parameters)], strict=True))
    of_inputs = dict(zip(call.requiring, gradients[len(parameters) :], strict=True))
    return Gradients(loss.detach(), {name: of_parameters.get(name) for name, _ in model.named_parameters()}, of_inputs)


_SEED = 20


class _DotProduct:
    """A loss over all results of a model: their dot product with random weights.

    Every element of a result has a gradient of its own, so that errors do not cancel. The loss is one for ``train_step``: a mean over
    the batch, whose target is split into microbatches with the inputs.

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
