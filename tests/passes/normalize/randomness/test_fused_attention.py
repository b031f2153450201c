"""Attention with dropout for accelerators: one kernel forward and one backward, which a backward that recomputes does not run again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from partitioner.reports.sources import InspectedPrograms
from partitioner.tracing.trace import trace
from passes.graph.schemas import draws
from passes.ir.program import StageCall
from passes.normalize.randomness.fused_attention import attention_with_dropout, fuse_attention, fused_attention

ROWS, HEADS, LENGTH, WIDTH = 4, 2, 8, 16


class Attention(nn.Module):
    """Causal self-attention with dropout, with an added bias of the scores or a mask of booleans if asked for."""

    def __init__(self, given: str) -> None:
        super().__init__()
        self.inner, self.given = nn.Linear(WIDTH, 3 * WIDTH), given
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH)) if given == "bias" else None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.inner(x).chunk(3, -1))
        if self.given == "three dimensions":
            query, key, value = (each.flatten(0, 1) for each in (query, key, value))
        mask = x[:, None, None, :, 0] > 0 if self.given == "mask" else self.bias
        result = nn.functional.scaled_dot_product_attention(query, key, value, mask, 0.5, self.given in ("", "three dimensions"))
        return result.reshape(x.shape[0], HEADS, LENGTH, -1).transpose(1, 2).flatten(-2)


def operators(given: str, recompute: str, *, fused: bool) -> Counter[str]:
    """Count the operators of attention in the training graphs of a stage."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(given))
    example = torch.randn(ROWS, LENGTH, WIDTH)
    pm = partition(model, 1, "pipeline", example_inputs=(example,), recompute=recompute, n_microbatches=1, progress=False)
    inspected = InspectedPrograms.of(pm.traced, None)
    (program,), _ = inspected.sharded.representatives(inspected.request, fused_attention=fused)
    stages = [module for module in program.module.children() if isinstance(module, StageCall)]
    return Counter(str(node.target) for stage in stages for node in stage.graph.graph.nodes if node.op == "call_function")


FORWARD, BACKWARD = (f"aten._scaled_dot_product_flash_attention_for_cpu{end}.default" for end in ("", "_backward"))


@pytest.mark.parametrize("given", ["mask", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", "three dimensions"))])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_attention_is_one_kernel_that_is_not_run_again(given: str, recompute: str) -> None:
    found = operators(given, recompute, fused=True)
    assert (found[FORWARD], found[BACKWARD], found["aten.bmm.default"]) == (1, 1, 0)


def test_programs_that_run_have_products_and_a_mask() -> None:
    found = operators("", "none", fused=False)
    assert (found[FORWARD], found[BACKWARD]) == (0, 0)
    assert found["aten.bmm.default"] > 1


def test_a_bias_with_a_gradient_is_differentiated_by_definition() -> None:
    found = operators("bias", "none", fused=True)
    assert (found[FORWARD], found[BACKWARD]) == (0, 0)


def test_a_graph_without_dropout_is_left_as_it_is() -> None:
    model, example = Attention(""), (torch.randn(ROWS, LENGTH, WIDTH),)
    graph = trace(model, example, training=True)
    (node,) = attention_with_dropout(graph)
    (call,) = [each for each in fuse_attention(graph).graph.nodes if each.target is fused_attention]
    assert draws(call)
    assert call.name == node.name
    node.args = (*node.args[:4], 0.0, *node.args[5:])
    assert fuse_attention(graph) is graph
