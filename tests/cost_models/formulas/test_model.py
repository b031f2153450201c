"""The work of a model in symbols: at another batch and another length of its sequences it is what the model traced at those sizes costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, nn

from benchmarks.transformer import VOCABULARY, gpt
from cost_models.formulas.model import ModelFormula, model_formula
from cost_models.graph_cost import graph_cost
from partitioner import partition
from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.ir.graph import ModelGraph
from tests.support.models.pretrained import bert, llama, t5

LAYERS, WIDTH = 2, 32


def tokens(length: int, batch: int = 4) -> Tensor:
    return torch.randint(1, 20, (batch, length))


def traced(model: nn.Module, *inputs: Tensor, **named: Tensor) -> ModelGraph:
    return trace(model.train(), inputs, named, training=True)


def formula_of(graph: ModelGraph) -> ModelFormula:
    return model_formula(graph, find_axes(graph.graph), differentiate=True)


def at(expression: sympy.Expr, **sizes: int) -> float:
    return float(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))


def test_a_gpt_in_closed_form() -> None:
    """72 b s l h^2 (1 + s / 6h + V / 12 l h), Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021.

    Besides, the backward of fused attention makes the scores again.
    """
    formula = formula_of(traced(gpt(LAYERS, WIDTH), tokens(16)))
    batch, sequence = (next(symbol for symbol in formula.flops.free_symbols if str(symbol) == name) for name in ("batch", "sequence"))
    ratio = sequence / (6 * sympy.Integer(WIDTH)) + VOCABULARY / (12 * sympy.Integer(LAYERS * WIDTH))
    scores = 2 * batch * sequence**2 * LAYERS * WIDTH
    assert sympy.expand(formula.flops - 72 * batch * sequence * LAYERS * WIDTH**2 * (1 + ratio) - scores) == 0


def _inputs_of_t5(length: int, batch: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(length, batch), "labels": tokens(length - 3, batch)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], dict[str, Tensor]]]] = {
    "llama": (llama, lambda length, batch: {"input_ids": tokens(length, batch), "labels": tokens(length, batch)}),
    "bert": (bert, lambda length, batch: {"input_ids": tokens(length, batch), "attention_mask": torch.ones(batch, length)}),
    "t5": (t5, _inputs_of_t5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_another_length_is_the_model_traced_at_it(name: str) -> None:
    """But for a thousandth of the bytes: labels shifted by one, masks made of positions."""
    model, inputs = MODELS[name]
    torch.manual_seed(0)
    instance = model()
    formula = formula_of(traced(instance, **inputs(11, 4)))
    cost = graph_cost(traced(instance, **inputs(15, 6)), differentiate=True)
    rows = {symbol: 6 for symbol in (cost.batch,) if symbol is not None}
    lengths = {name: size + 4 for name, size in formula.defaults.items() if name != "batch"}
    told, wanted, astray = 0.0, 0.0, 0.0
    for operation in formula.operations:
        expected = cost.nodes[operation.name]
        backward = expected.backward_input + expected.backward_weight
        for one, other in ((operation.forward_flops, expected.forward.flops), (operation.backward_flops, backward.flops)):
            assert at(one, batch=6, **lengths) == float(sympy.sympify(other).subs(rows)), operation
        moved = at(operation.forward_bytes + operation.backward_bytes, batch=6, **lengths)
        kernels = [kernel for work in (expected.forward, backward) for kernel in (work, *work.then)]
        size = float(sympy.sympify(sum(kernel.bytes for kernel in kernels)).subs(rows))
        told, wanted, astray = told + moved, wanted + size, astray + abs(moved - size)
    assert told == at(formula.bytes, batch=6, **lengths)
    assert astray < 1e-3 * wanted


@pytest.mark.slow
def test_it_is_told_beside_the_step() -> None:
    pm = partition(gpt(LAYERS, WIDTH).train(), 2, "pipeline", example_inputs=(tokens(16),), progress=False)
    text = str(pm.cost_formula())
    assert "FLOPs of the whole model, forward and backward" in text
    assert "batch*sequence**2" in text
    assert "*.qkv (2)" in text
