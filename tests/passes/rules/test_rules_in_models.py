"""Rules hold for every operation of the models in ``tests/support/models``, with the operands that it meets there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten

from partitioner.tracing.trace import trace
from passes.ir.graph import ModelGraph
from passes.rules.registry import loops_of
from passes.rules.validate import prove_rule
from tests.support.models import pretrained
from tests.support.models.case import Case, Instance
from tests.support.models.zoo import ZOO, case_named

WITHOUT_A_RULE: frozenset[str] = frozenset()
"""Operations in ``tests/support/models`` that are computed on gathered operands."""


def operations(graph: ModelGraph) -> Iterator[fx.Node]:
    return (node for node in graph.graph.nodes if node.op == "call_function" and isinstance(node.target, OpOverload))


class Recorder(fx.Interpreter):
    """Runs a graph and proves the rule of every call with the operands that it meets, once a signature."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.proved: set[str] = set()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, OpOverload) and str(target) not in WITHOUT_A_RULE:
            leaves, tree = tree_flatten((args, kwargs))
            shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            signature = f"{target} {tree} {shapes}"
            if signature not in self.proved:
                self.proved.add(signature)
                with torch.no_grad():
                    prove_rule(target, *args, **kwargs)
        return super().call_function(target, args, kwargs)


def placeholders(graph: ModelGraph, instance: Instance) -> list[Any]:
    """Return values of the graph's placeholders for one batch."""
    tensors = {**dict(instance.model.named_parameters()), **dict(instance.model.named_buffers())}
    given, _ = tree_flatten((instance.args, dict(instance.kwargs)))
    values: dict[str, Any] = dict(graph.constants)
    values.update({placeholder: tensors[name].detach() for placeholder, name in (*graph.parameters.items(), *graph.buffers.items())})
    for leaf, value in zip(graph.inputs, given, strict=True):
        if leaf.placeholder is not None:
            values[leaf.placeholder] = value
        if leaf.batch_dim is not None:
            values["batch"] = value.shape[leaf.batch_dim]
    return [values[node.name] for node in graph.graph.nodes if node.op == "placeholder"]


LONG = {
    *("batch_norm_convolution", "clip", "encoder_decoder", "gpt", "group_norm_convolution", "gru", "integers_and_flags", "lstm"),
    *("padded_attention", "parameterless", "residual", "unet"),
}


def is_slow(case: Case) -> bool:
    return case in pretrained.CASES or case.name in LONG


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=pytest.mark.slow if is_slow(case) else ()) for case in ZOO])
def test_rules_hold_in_models(case: Case) -> None:
    instance = case.build()
    graph = trace(instance.model, instance.args, instance.kwargs)
    missing = {str(node.target) for node in operations(graph) if loops_of(node) is None}
    assert missing <= WITHOUT_A_RULE
    recorder = Recorder(graph.module)
    recorder.run(*placeholders(graph, instance))
    assert recorder.proved


def test_thousands_of_nodes_take_a_moment() -> None:
    """GPT-3's 96 blocks are 3,300 nodes; repeated here from a small model, so that most signatures are known."""
    instance = case_named("gpt").build()
    nodes = list(operations(trace(instance.model, instance.args, instance.kwargs)))
    start = time.process_time()
    for index in range(3300):
        loops_of(nodes[index % len(nodes)])
    assert time.process_time() - start < 0.5
