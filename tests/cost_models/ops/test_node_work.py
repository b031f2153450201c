"""Work of the nodes of programs, backward included, compared with PyTorch's count of the same models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.long_context import Subject
from cost_models.formulas.symbols import Numbers
from cost_models.ops.cost import node_work
from cost_models.ops.work import Work
from partitioner import partition
from passes.ir.program import StageCall
from passes.spmd.decompose.attention_block import attention_block, attention_block_backward
from tests.support.models.case import Case, Instance
from tests.support.models.zoo import ZOO

MODELS = ("gpt", "unet", "bert")

FUSED_ATTENTION = {"gpt", "bert"}
"""Their attention computes its scores again in the backward; the counter's reference here does not."""


def works(instance: Instance) -> Iterator[tuple[fx.Node, Work]]:
    """Yield the work of all nodes of a training step on one device."""
    pm = partition(instance.model, 1, "model", example_inputs=instance.args, example_kwargs=dict(instance.kwargs))
    for module in pm.graph(0).children():
        if isinstance(module, StageCall):
            yield from ((node, node_work(node)) for node in module.graph.graph.nodes)


def counted(instance: Instance) -> int:
    """FLOPs of a forward and a backward, as PyTorch counts them."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = instance.model(*instance.args, **instance.kwargs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        sum((leaf.sum() for leaf in leaves), start=torch.zeros(())).backward()
    return int(counter.get_total_flops())


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in ZOO if case.name in MODELS])
def test_flops_of_a_training_step(case: Case) -> None:
    instance = case.build()
    batch = next(leaf.shape[0] for leaf in tree_leaves((instance.args, instance.kwargs)) if isinstance(leaf, Tensor))
    numbers = Numbers(batch)
    told = {node: numbers[work.flops] for node, work in works(instance)}
    reference = counted(instance)
    if case.name in FUSED_ATTENTION:
        again = sum(flops / 5 for node, flops in told.items() if "attention" in str(node.target) and "backward" in str(node.target))
        assert sum(told.values()) - again == pytest.approx(reference)
    else:
        assert sum(told.values()) == reference


@pytest.mark.slow
def test_attention_by_blocks_multiplies_what_it_visits() -> None:
    """In zigzag order: 2n + 1 products of pieces; in the gradients the scores again, and five products in place of two."""
    ranks, length, heads, width = 2, 16, 8, 32
    pm = Subject("zigzag", ranks, length, layers=1).partitioned
    piece = length // (2 * ranks)
    flops = {attention_block: 0.0, attention_block_backward: 0.0}
    for node in pm.graph(0).graph.nodes:
        if node.target in flops:
            flops[node.target] += Numbers(1)[node_work(node).flops]
    one = 2 * heads * piece**2 * width
    assert flops == {attention_block: 2 * one * (2 * ranks + 1), attention_block_backward: 5 * one * (2 * ranks + 1)}


def test_views_do_nothing_and_copies_move_bytes() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(0, 1).contiguous().view(-1)

    pm = partition(Turned().eval(), 1, "model", example_inputs=(torch.rand(4, 6),))
    stage = next(module for module in pm.graph(0).children() if isinstance(module, StageCall))
    moved = {node.name: Numbers(4)[node_work(node).bytes] for node in stage.graph.graph.nodes}
    assert max(moved.values()) == 2 * 4 * 6 * 4
    assert sum(size > 0 for size in moved.values()) == 1
