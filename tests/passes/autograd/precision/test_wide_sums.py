"""Sums of gradients over ranks exchanged with casts to a wider type."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from partitioner import partition
from passes.ir.comm.primitives import all_reduce, reduce_scatter
from tests.support.models.attention.gpt import VOCABULARY, Gpt


def sums(graph: fx.Graph) -> list[tuple[str, torch.dtype]]:
    """Return the type of each operand of a sum over ranks."""
    found = []
    for node in graph.nodes:
        if node.target in (all_reduce, reduce_scatter) and not node.meta.get("reduces"):
            found += [(node.target.__name__, operand.meta["val"].dtype) for operand in node.args[0]]
    return found


@pytest.mark.parametrize("mode", [pytest.param("tensor", marks=pytest.mark.slow), "fsdp"])
def test_sums_of_activations_keep_their_type(mode: str) -> None:
    """Gradients of activations are summed in bfloat16 over tensor ranks, as activations are; those of parameters are not."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (4, 6))
    pm = partition(Gpt(16, 2, 1), 2, mode, example_inputs=(tokens,), precision="bf16-mixed", progress=False)
    found = sums(pm.graph(0).graph)
    if mode == "fsdp":
        assert {dtype for _, dtype in found} == {torch.float32}
    else:
        assert ("all_reduce", torch.bfloat16) in found


def test_a_sum_that_another_reader_needs_narrow_stays() -> None:
    """A parameter in bfloat16 has its sum in bfloat16, without a cast."""
    pm = partition(nn.Linear(8, 8).bfloat16(), 2, "fsdp", example_inputs=(torch.randn(4, 8).bfloat16(),), progress=False)
    assert {dtype for _, dtype in sums(pm.graph(0).graph)} == {torch.bfloat16}
