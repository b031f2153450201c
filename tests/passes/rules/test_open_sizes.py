"""Rules meet graphs whose batch size is open: sizes and numbers that are expressions. A rule that cannot tell says so, and never raises."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx

from passes.ir.tensor_spec import TensorSpec
from passes.ir.torch_private import OpOverload, tree_map_only
from passes.rules.call import Call, call_of
from passes.rules.registry import loops_of_call
from tests.support.samples.rule_samples import samples
from tests.support.samples.rule_samples_values import Sample

BATCH = sympy.Symbol("batch", positive=True, integer=True)

OF_OPERATORS: dict[OpOverload, list[Sample]] = {}
for sample in samples():
    OF_OPERATORS.setdefault(sample.operator, []).append(sample)


def call_of_sample(sample: Sample) -> Call | None:
    graph = fx.Graph()

    def placeholder(value: Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    args, kwargs = tree_map_only(Tensor, placeholder, (tuple(sample.args), dict(sample.kwargs)))
    node = graph.call_function(sample.operator, args, kwargs)
    node.meta["val"] = sample.operator(*sample.args, **sample.kwargs)
    return call_of(node)


def with_open_sizes(call: Call) -> Iterator[Call]:
    """Yield the call with each of its sizes open, alone and together with equal numbers."""
    for size in {size for shape in (*(operand.shape for operand in call.operands), *call.results) for size in shape} - {0, 1}:
        for opened in (BATCH, 2 * BATCH):
            for numbers in (False, True):

                def open_(value: Any, size: Any = size, opened: sympy.Expr = opened, numbers: bool = numbers) -> Any:
                    if isinstance(value, TensorSpec):
                        return dataclasses.replace(value, shape=tuple(opened if each == size else each for each in value.shape))
                    if isinstance(value, tuple):
                        return tuple(open_(each) for each in value)
                    return opened if numbers and type(value) is int and value == size else value

                yield dataclasses.replace(call, values=open_(call.values), outputs=open_(call.outputs))


@pytest.mark.parametrize("operator", OF_OPERATORS, ids=str)
def test_no_rule_raises(operator: OpOverload) -> None:
    for sample in OF_OPERATORS[operator]:
        with torch.no_grad():
            call = call_of_sample(sample)
        for each in with_open_sizes(call) if call is not None else ():
            loops_of_call(each)
