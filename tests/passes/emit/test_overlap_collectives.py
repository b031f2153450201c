"""Collectives start before what hides them, in an order that all ranks share."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import pytest
import torch
import transformers
from torch import fx, nn

from benchmarks.transformer import gpt
from partitioner import PartitionedModel, partition
from passes.emit.overlap_collectives import overlap_communication
from passes.ir.comm.primitives import all_gather, all_reduce, reduce_scatter, wait
from tests.support.running.transparency import assert_step_equals

WIDTH = 512
"""Of layers whose gradients are 2 MiB: the last one fills the first bucket."""


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))).double()


def partitioned(mode: Mapping[str, int]) -> tuple[PartitionedModel, torch.Tensor]:
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    return partition(perceptron(), 4, mode, example_inputs=(x,), cluster="h100:2x2", progress=False), x


def started(graph: fx.Graph) -> list[fx.Node]:
    """Return the reductions of gradients and the matrix products, in order."""
    sums = {node for node in graph.nodes if node.target is all_reduce and "gradients" in node.name}
    return [node for node in graph.nodes if node in sums or node.target in (reduce_scatter, torch.ops.aten.mm.default)]


@pytest.mark.parametrize("scattered", ["fsdp", "zero2"])
def test_scattered_gradients_are_summed_while_the_backward_computes(scattered: str) -> None:
    pm, x = partitioned({"data": 2, scattered: 2})
    orders = [[node.target for node in started(graph.graph)] for graph in pm.graphs]
    assert all(order == orders[0] for order in orders)
    targets = orders[0]
    products = [place for place, target in enumerate(targets) if target is torch.ops.aten.mm.default]
    assert reduce_scatter in targets
    assert targets.index(all_reduce) < products[-1]
    assert_step_equals(pm, perceptron(), x, target=torch.randn(8, WIDTH, dtype=torch.float64))


def _operands(collective: fx.Node) -> Sequence[fx.Node]:
    operands = collective.args[0]
    assert isinstance(operands, list | tuple)
    return [each for each in operands if isinstance(each, fx.Node)]


def test_weights_are_gathered_one_ahead_of_their_use() -> None:
    """While the program waits for one gather, one more is under way, also in backwards that gather views of weights again."""
    with torch.device("meta"):
        model, tokens = gpt(4, 1024), torch.zeros(8, 256, dtype=torch.int64)
    (graph, *_) = partition(model, 2, "fsdp", example_inputs=(tokens,), recompute="full", cluster="h100:1x2", progress=False).graphs
    place = {node: number for number, node in enumerate(graph.graph.nodes)}
    gathers = [node for node in place if node.target is all_gather and len(_operands(node)) == 1]  # small weights share a message
    spans = [(place[node], min(place[user] for user in node.users)) for node in gathers]
    assert len(spans) > 8
    for start, end in spans:
        assert sum(start < other < end for _, other in spans) <= 1


def test_a_viewed_gradient_of_an_input_is_reduced_while_that_of_the_weight_is_computed() -> None:
    """Products of inputs of three dimensions are views of those of two."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.zeros(4, 8, 64)
        model = nn.Sequential(nn.LayerNorm(64), model)
    (graph, *_) = partition(model, 2, "tensor", example_inputs=(x,), cluster="h100:1x2", progress=False).graphs
    targets = [node.target for node in graph.graph.nodes]
    product, last_reduction = torch.ops.aten.mm.default, max(place for place, target in enumerate(targets) if target is all_reduce)
    assert product in targets[last_reduction:]


def test_reductions_of_values_do_not_wait_for_those_of_gradients() -> None:
    """Two gradients are under way, over a slow link; a value is reduced besides, and read."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    results = []
    for _ in range(3):
        start = graph.call_function(reduce_scatter, ([graph.call_function(torch.ops.aten.relu.default, (x,))],))
        results.append(graph.call_function(operator.getitem, (graph.call_function(wait, (start,)), 0)))
    read = graph.call_function(torch.ops.aten.tanh.default, (results[-1],))
    graph.output((read, *results[:2]))
    overlap_communication([graph])
    order = [node.target for node in graph.nodes if node.op == "call_function"]
    assert order.index(torch.ops.aten.tanh.default) < len(order) - 1 - order[::-1].index(wait)
    assert order[: order.index(torch.ops.aten.tanh.default)].count(wait) == 1


@pytest.mark.slow
def test_views_of_saved_shards_are_gathered_again_one_ahead_of_their_use() -> None:
    """Layers of GPT-2 view what they read. Gathers that began together would all be in memory at once, also in simulations."""
    sizes = {"n_layer": 3, "n_embd": 512, "n_head": 8, "n_positions": 512, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    with torch.device("meta"):
        model, tokens = transformers.GPT2LMHeadModel(config).train(), torch.zeros(8, 512, dtype=torch.int64)
    options = {"recompute": "selective", "precision": "bf16-mixed", "cluster": "h100:1x4", "progress": False}
    pm = partition(model, 4, "tensor", example_kwargs={"input_ids": tokens, "labels": tokens}, **options)  # type: ignore[arg-type]
    place = {node: number for number, node in enumerate(pm.graphs[0].graph.nodes)}
    again = [node for node in place if node.target is all_gather and node.meta.get("again")]
    viewed = [node for node in again if all(each.target is torch.ops.aten.reshape.default for each in _operands(node))]
    spans = [(place[node], min(place[user] for user in node.users)) for node in again]
    ahead = [sum(start < other < end for other, _ in spans) for start, end in spans]
    assert len(viewed) > 4
    assert max(ahead) == 1
    assert ahead.count(1) >= len(viewed) - 1  # the last gathers what is computed again, of the embedding
    held = sum(part.bytes for part in pm.simulate().memory[0].alive if part.category == "communication")
    assert held <= 2 * tokens.numel() * config.n_embd * torch.bfloat16.itemsize
