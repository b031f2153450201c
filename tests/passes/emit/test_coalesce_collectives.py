"""Gathers that are sent in one message."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from passes.emit.coalesce_collectives import ALONE_BYTES, coalesce_collectives
from passes.ir.comm.primitives import all_gather, all_to_all, reduce_scatter, wait
from passes.ir.torch_private import OpOverload


def gathered(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Gather a value of 8 bytes a rank over two ranks."""
    start = graph.call_function(all_gather, ([value], (0,)), {"group": (0, 1)})
    start.meta["bytes"] = 8
    return graph.call_function(operator.getitem, (graph.call_function(wait, (start,)), 0))


def gathers_of(second: str) -> list[int]:
    """Return the number of tensors in each gather of a program, whose second gather is of a parameter or of the first one's result."""
    graph = fx.Graph()
    first = gathered(graph, graph.create_node("get_attr", "weight"))
    source = first if second == "result" else graph.create_node("get_attr", "other")
    transposed = graph.call_function(torch.ops.aten.t.default, (source,))
    graph.output((first, gathered(graph, transposed)))
    coalesce_collectives([graph])
    return [len(node.args[0]) for node in graph.nodes if node.target is all_gather]


def test_parameters_are_gathered_together() -> None:
    assert gathers_of("parameter") == [2]


def test_what_is_made_of_a_gathered_value_is_gathered_after_it() -> None:
    assert gathers_of("result") == [1, 1]


def test_a_bundle_of_gathers_holds_no_more_of_each_rank_than_a_part_that_is_sent_alone() -> None:
    graph, sixteenth = fx.Graph(), ALONE_BYTES // 16
    sizes = [5, 5, 5, 5, 16, 1, 1]
    results = [gathered(graph, graph.create_node("get_attr", f"weight{number}")) for number in range(len(sizes))]
    starts = [node for node in graph.nodes if node.target is all_gather]
    for start, size in zip(starts, sizes, strict=True):
        start.meta["bytes"] = size * sixteenth
    graph.output(tuple(results))
    coalesce_collectives([graph])
    assert [len(node.args[0]) for node in graph.nodes if node.target is all_gather] == [3, 3, 1]


def program_of(sizes: list[int], of_rank: int) -> fx.Graph:
    """Gather three parameters, of whose rows two ranks have ``sizes``; a row has a quarter of the bytes that are sent alone."""
    graph, results = fx.Graph(), []
    for name in ("one", "two", "three"):
        weight = graph.create_node("get_attr", name)
        weight.meta["val"] = torch.empty(sizes[of_rank], ALONE_BYTES // 16)
        start = graph.call_function(all_gather, ([weight], (0,)), {"group": (0, 1), "sizes": [tuple(sizes)]})
        results.append(graph.call_function(operator.getitem, (graph.call_function(wait, (start,)), 0)))
    graph.output(tuple(results))
    return graph


@pytest.mark.parametrize(("others", "expected"), [([1, 1], [3]), ([1, 2], [2, 1]), ([1, 4], [1, 1, 1])])
def test_ranks_of_unlike_groups_coalesce_alike(others: list[int], expected: list[int]) -> None:
    """Two groups start the same gathers, of which those of the other group are larger: its largest part decides for all."""
    graphs = [program_of(sizes, of_rank) for sizes in ([1, 1], others) for of_rank in (0, 1)]
    coalesce_collectives(graphs)
    assert [[len(node.args[0]) for node in graph.nodes if node.target is all_gather] for graph in graphs] == [expected] * 4


def test_a_parameter_that_ranks_exchange_first_is_gathered_with_others() -> None:
    graph = fx.Graph()
    weights = [graph.create_node("get_attr", name) for name in ("one", "two")]
    exchange = graph.call_function(all_to_all, ([weights[1]], (0,), (0,)), {"group": (0, 1)})
    exchanged = graph.call_function(operator.getitem, (graph.call_function(wait, (exchange,)), 0))
    results = [gathered(graph, weights[0])]
    read = graph.call_function(torch.ops.aten.neg.default, (results[0],))
    results.append(gathered(graph, graph.call_function(torch.ops.aten.t.default, (exchanged,))))
    graph.output((read, *results))
    coalesce_collectives([graph])
    assert [len(node.args[0]) for node in graph.nodes if node.target is all_gather] == [2]


def scatters_of(first_reader: str) -> list[list[str]]:
    """Return the calls after each scatter of two gradients, of which the first is viewed, or added to, before the second is there."""
    graph = fx.Graph()
    results = []
    for name in ("one", "two"):
        gradient = graph.create_node("get_attr", name)
        start = graph.call_function(
            reduce_scatter, ([graph.call_function(torch.ops.aten.neg.default, (gradient,))], (0,)), {"group": (0, 1)}
        )
        start.meta["bytes"] = 8
        item = graph.call_function(operator.getitem, (graph.call_function(wait, (start,)), 0))
        read = torch.ops.aten.view.default if first_reader == "view" else torch.ops.aten.add.Tensor
        results.append(graph.call_function(read, (item, [4] if first_reader == "view" else item)))
    graph.output(tuple(graph.call_function(torch.ops.aten.mul.Tensor, (each, 2)) for each in results))
    coalesce_collectives([graph])
    calls = [node for node in graph.nodes if node.op == "call_function"]
    places = [place for place, node in enumerate(calls) if node.target is reduce_scatter]
    return [[str(node.target) for node in calls[place + 1 :] if isinstance(node.target, OpOverload)] for place in places]


def test_gradients_that_are_viewed_once_they_are_there_are_scattered_together() -> None:
    assert scatters_of("view") == [["aten.view.default", "aten.view.default", "aten.mul.Tensor", "aten.mul.Tensor"]]


def test_a_gradient_that_is_read_before_the_next_one_is_there_is_scattered_alone() -> None:
    assert len(scatters_of("add")) == 2
