"""Cut a stage into regions that can be differentiated one by one: where blocks repeat, each is one.

    h = embedding(tokens)        region 0
    h_1 = block 0 of h           region 1
    h_2 = block 1 of h_1         region 2, alike
    logits = head(norm(h_2))     region 3

Any cut is right; one at repeating blocks makes many regions alike. What only counts sizes belongs to no region.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, fx

from passes.graph.dependencies import boundary
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.repeated_subgraphs import longest_run, signatures
from passes.stages.split import StageGraph

aten = torch.ops.aten

_LEAST = 6
"""Nodes that must repeat for a cut to be worth it: each region is traced by itself, which costs as much as some nodes do."""


@dataclass(frozen=True)
class Region:
    """Consecutive nodes.

    Attributes:
        nodes: in order.
        inputs: what they read from outside, in order of first use.
        outputs: those that are read outside.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


RegionStep: TypeAlias = Region | fx.Node
"""A region, or a node that counts sizes."""


def regions_of(graph: fx.Graph) -> tuple[RegionStep, ...]:
    """Return the steps of a graph, sizes first: one region where nothing repeats, or regions cannot be separated.

    They cannot where something other than a tensor goes from region to region, where one writes a buffer that another reads, or where a
    view counts from the beginning of memory.
    """
    sizes = _sizes(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function" and node not in sizes]
    regions = [_region(part) for part in _cut(nodes, signatures(nodes, lambda _: "")) if part]
    counts_from_start = any(node.target is aten.as_strided.default for node in nodes)
    if len(regions) > 1 and (counts_from_start or not all(map(_has_real_strided_borders, regions)) or _writes_across(regions)):
        regions = [_region(nodes)]
    return (*(node for node in graph.nodes if node in sizes), *regions)


def _region(nodes: Sequence[fx.Node]) -> Region:
    return Region(tuple(nodes), *boundary(nodes))


def _sizes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that compute sizes from placeholders alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_size = node.op == "call_function" and isinstance(node.meta.get("val"), int | torch.SymInt)
        if is_size and all(source.op == "placeholder" or source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _cut(nodes: Sequence[fx.Node], found: Sequence[int]) -> Iterator[Sequence[fx.Node]]:
    """Yield the copies of the longest run, and the same for the nodes before and after it."""
    run = longest_run(nodes, found)
    if run is None or (run.count - 1) * run.length < _LEAST:
        yield nodes
        return
    end = run.start + run.count * run.length
    yield from _cut(nodes[: run.start], found[: run.start])
    for first in range(run.start, end, run.length):
        yield nodes[first : first + run.length]
    yield from _cut(nodes[end:], found[end:])


def _has_real_strided_borders(region: Region) -> bool:
    """Return whether all inputs except sizes, and all outputs, are strided, real tensors, from which autograd can start."""
    values = [node.meta.get("val") for node in region.inputs]
    tensors = [value for value in values if not isinstance(value, torch.SymInt)] + [node.meta.get("val") for node in region.outputs]
    return all(isinstance(value, Tensor) and value.layout == torch.strided and not value.is_complex() for value in tensors)


def _writes_across(regions: Sequence[Region]) -> bool:
    """Return whether a region writes a buffer that another reads: autograd must see both to refuse overwritten values."""
    readers: dict[fx.Node, set[int]] = {}
    for index, region in enumerate(regions):
        for source in region.inputs:
            readers.setdefault(source, set()).add(index)
    written = {write.args[0] for region in regions for write in region.nodes if write.target is aten.copy_.default}
    return any(len(readers.get(place, ())) > 1 for place in written if isinstance(place, fx.Node))


def region_module(inputs: Sequence[fx.Node], region: Region) -> fx.GraphModule:
    """Return a region as a graph of its own, whose output is the tuple of its outputs.

    Args:
        inputs: those of the region, in the order of the placeholders.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"val": node.meta["val"]}
    for node in region.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[node] for node in region.outputs))
    graph.lint()
    return LazyGraphModule({}, graph, class_name="Region")


def region_stage(
    stage: StageGraph, region: Region, module: fx.GraphModule, parameters: Iterable[str], buffers: Iterable[str], values: Iterable[str]
) -> StageGraph:
    """Return a region of a stage as a stage of its own.

    Args:
        module: its graph.
        parameters: names of the inputs that are parameters.
        buffers: names of the inputs that stay with the stage, and have no gradient.
        values: names of the other inputs, which each microbatch brings.
    """
    outputs = tuple(node.name for node in region.outputs)
    recomputed = stage.recomputed.intersection(node.name for node in region.nodes)
    bound = tuple(parameters), tuple(buffers), ()
    return StageGraph(stage.index, module, *bound, (), tuple(values), outputs, has_batch=False, device=stage.device, recomputed=recomputed)
