"""Run a traced graph as the model that it was traced from, and compare the two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from passes.ir.graph import ModelGraph

SEED = 7


class Call(nn.Module):
    """A linear layer beside any function: the function takes the layer and the inputs."""

    def __init__(self, function: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer, *args, **kwargs)


@dataclass(frozen=True)
class Run:
    """Results of one call.

    Attributes:
        leaves: of the result, in pytree order.
        gradients: original name -> gradient of the sum of all results; None where there is none.
        inputs: gradient of each floating-point input leaf; None where there is none.
        buffers: original name -> value afterwards.
    """

    leaves: tuple[Any, ...]
    gradients: Mapping[str, Tensor | None]
    inputs: tuple[Tensor | None, ...]
    buffers: Mapping[str, Tensor]


def run_model(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, gradient_of_inputs: bool = True) -> Run:
    """Call a copy of the model itself."""
    model = copy.deepcopy(model)
    args, kwargs = own_values((args, dict(kwargs)), gradient_of_inputs)
    torch.manual_seed(SEED)
    result = model(*args, **kwargs)
    leaves = tuple(tree_leaves(result))
    backward(leaves)
    return Run(
        tuple(_detached(leaf) for leaf in leaves),
        {name: parameter.grad for name, parameter in model.named_parameters()},
        tuple(leaf.grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad),
        dict(model.named_buffers()),
    )


def run_traced(
    graph: ModelGraph, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, gradient_of_inputs: bool = True
) -> Run:
    """Feed the placeholders of a graph with a copy of the model's tensors and the inputs, and call it."""
    model = copy.deepcopy(model)
    args, kwargs = own_values((args, dict(kwargs)), gradient_of_inputs)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given, tree = tree_flatten((args, kwargs))
    assert tree == graph.input_tree
    values: dict[str, Any] = dict(graph.constants)
    values.update({placeholder: tensors[name] for placeholder, name in (*graph.parameters.items(), *graph.buffers.items())})
    for leaf, value in zip(graph.inputs, given, strict=True):
        if leaf.placeholder is not None:
            values[leaf.placeholder] = value
        if leaf.batch_dim is not None:
            values["batch"] = value.shape[leaf.batch_dim]
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    torch.manual_seed(SEED)
    results = graph.module(*(values[name] for name in names))[: len(graph.leaves)]
    backward(results)
    return Run(
        tuple(_detached(leaf) for leaf in results),
        {name: parameter.grad for name, parameter in model.named_parameters()},
        tuple(leaf.grad for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad),
        dict(model.named_buffers()),
    )


def assert_equal_runs(actual: Run, expected: Run, tolerance: float = 1e-12) -> None:
    """Check that results, gradients and buffers agree; None and non-tensor leaves are equal."""
    for got, wanted in zip(actual.leaves, expected.leaves, strict=True):
        _assert_equal(got, wanted, tolerance)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, wanted in expected.gradients.items():
        _assert_equal(actual.gradients[name], wanted, tolerance, name)
    for got, wanted in zip(actual.inputs, expected.inputs, strict=True):
        _assert_equal(got, wanted, tolerance)
    assert actual.buffers.keys() == expected.buffers.keys()
    for name, wanted in expected.buffers.items():
        _assert_equal(actual.buffers[name], wanted, tolerance, name)


def _assert_equal(actual: Any, expected: Any, tolerance: float, name: str = "") -> None:
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")
    else:
        assert type(actual) is type(expected), name
        assert actual == expected, name


def own_values(values: Any, gradient: bool) -> Any:
    """Return the same values in their own memory; floating-point leaves may require gradients."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(gradient and leaf.is_floating_point())

    return torch.utils._pytree.tree_map(own, values)


def backward(leaves: Sequence[Any], weights: Sequence[int] | None = None) -> None:
    """Differentiate the sum of all results, each weighted differently: by its place, unless weights are given."""
    total = sum(
        (weight + 1) * leaf.double().sin().sum()
        for weight, leaf in zip(weights or range(len(leaves)), leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
