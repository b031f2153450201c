"""A graph for one batch size computes, for that size, what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partitioner.tracing.trace import trace
from passes.normalize.specialize_batch import fix_batch
from tests.support.models.case import Case
from tests.support.models.zoo import ZOO

FAST = ("perceptron",)


@pytest.mark.parametrize("case", [pytest.param(each, marks=() if each.name in FAST else pytest.mark.slow, id=each.name) for each in ZOO])
def test_the_fixed_graph_computes_what_the_model_computes(case: Case) -> None:
    instance = case.build(seed=0)
    model = instance.model.eval()
    graph = trace(model, instance.args, dict(instance.kwargs), training=False)
    if graph.batch is None:
        pytest.skip("the model was traced for one batch size alone: there is nothing left to fix")
    given = case.build(seed=1, batch_size=6)
    fixed = fix_batch(graph, 6)
    assert fixed.batch is None
    assert fixed.batch_size == 6
    leaves = pytree.tree_leaves((given.args, dict(given.kwargs)))
    values: dict[str, Any] = {placeholder: model.get_parameter(name) for placeholder, name in graph.parameters.items()}
    values |= {placeholder: model.get_buffer(name) for placeholder, name in graph.buffers.items()} | dict(graph.constants)
    values |= {leaf.placeholder: value for leaf, value in zip(fixed.inputs, leaves, strict=True) if leaf.placeholder is not None}
    names = [node.name for node in fixed.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        found = fixed.module(*(values[name] for name in names))
        expected = model(*given.args, **given.kwargs)
    for name in names:
        (node,) = (each for each in fixed.graph.nodes if each.name == name)
        assert tuple(node.meta["val"].shape) == tuple(values[name].shape)
    results = [value for value, output in zip(found, fixed.outputs, strict=True) if output.destination is None]
    for value, leaf in zip(results, pytree.tree_leaves(expected), strict=True):
        if isinstance(leaf, Tensor):
            torch.testing.assert_close(value, leaf)


class Enhanced(nn.Module):
    """A wave whose spectrum is scaled. ``torch.istft`` reads values of its window, which fake tensors do not have."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.scale = nn.Parameter(torch.rand(9, 1))

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 16, 4, window=self.window, return_complex=True)
        return torch.istft(spectrum * self.scale, 16, 4, window=self.window, length=wave.shape[-1])


def test_an_operation_that_reads_values() -> None:
    model, wave = Enhanced(), torch.randn(6, 40)
    fixed = fix_batch(trace(model, (torch.randn(4, 40),)), 6)
    with torch.no_grad():
        (found,) = fixed.module(*(model.scale if name.startswith("p_") else model.window for name in fixed.weights), wave)
        torch.testing.assert_close(found, model(wave))
