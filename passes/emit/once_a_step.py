"""Gather the parameters of ZeRO once for all microbatches of a step, and scatter their gradients once (``"zero1"``).

    before                                              after

    forward    (w_part, x) -> mm(x, gather(w_part))     gathers    (w_part) -> gather(w_part)           once
                                                        forward    (w, x) -> mm(x, w)                   each microbatch

    backward   (x, dy) -> reduce_scatter(mm(x, dy))     backward   (x, dy) -> mm(x, dy)                 each microbatch
                                                        scatters   (dw) -> reduce_scatter(dw)           once, of the sum

Parameters stay whole from the first forward to the last backward. Gradients of ``"zero1"`` are summed whole over microbatches, in the type
of the parameter; those of ``"zero2"`` are kept in parts (Rajbhandari et al., 2020), so that each microbatch scatters its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from passes.autograd.partition_joint import DifferentiatedStage
from passes.autograd.staged_model import SplitModel
from passes.graph.aliasing import aliasing
from passes.graph.equivalence import argument_key
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.schemas import is_cast_or_view
from passes.ir.comm.functional import FOR_ALL, all_gather, all_reduce, makes_memory, reduce_scatter, replicate
from passes.ir.mesh import GATHERED_ONCE, SCATTERED_ONCE
from passes.stages.split import StageGraph

aten = torch.ops.aten

_CAST = aten._to_copy.default  # noqa: SLF001  what a conversion comes down to

_GATHERS = frozenset({all_gather, replicate})


def communicating_once(lowered: SplitModel) -> SplitModel:
    """Return stages whose parameters are gathered, and whose gradients are scattered, by graphs of their own."""
    known: dict[int, DifferentiatedStage] = {}  # stages that compute the same share graphs
    stages, training = list[StageGraph](), list[DifferentiatedStage]()
    for stage in lowered.stages:
        gathers, module = _gathered_first(stage, stage.module)
        stages.append(replace(stage, gathers=gathers, module=module))
    for stage, graphs in zip(lowered.stages, lowered.training, strict=False):
        if id(graphs.forward) not in known:
            gathers, forward = _gathered_first(stage, graphs.forward)
            known[id(graphs.forward)] = replace(_scattered_last(graphs), gathers=gathers, forward=forward)
        found = known[id(graphs.forward)]
        training.append(replace(graphs, **{name: getattr(found, name) for name in _REWRITTEN}))
    return replace(lowered, stages=tuple(stages), training=tuple(training))


_REWRITTEN = ("gathers", "forward", "backward", "backward_weight", "scatters", "received")


def _module(graph: fx.Graph, like: fx.GraphModule, suffix: str = "") -> fx.GraphModule:
    graph.lint()
    return LazyGraphModule({}, graph, class_name=f"{type(like).__name__}{suffix}")


# -- gathers ---------------------------------------------------------------------------------------------------------------------------


def _gathered_first(stage: StageGraph, module: fx.GraphModule) -> tuple[fx.GraphModule | None, fx.GraphModule]:
    """Return the graph that gathers a stage's parameters, and the forward that takes them; None, and the forward unchanged, if none is.

    Forward: bound, gathered parameters, arguments -> as before.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    bound, arguments = placeholders[: len(stage.bound)], placeholders[len(stage.bound) :]
    chain, gathers = _gathers_of(module.graph, bound[: len(stage.parameters)])
    if not gathers:
        return None, module
    once = fx.Graph()
    copies = _copied(once, bound, [node for node in (*chain, *gathers) if node not in bound])
    for node in gathers:
        copies[node].meta[FOR_ALL] = True
    once.output(tuple(copies[node] for node in gathers))
    _erase_unread(once, [copies[node] for node in chain])
    forward = fx.Graph()
    copies = _copied(forward, [*bound, *gathers, *arguments], module.graph.nodes)
    _erase_unread(forward, [copies[node] for node in chain])
    return _module(once, module, "Gathers"), _module(forward, module)


def _gathers_of(graph: fx.Graph, parameters: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the parameters with their casts and views, and the gathers of these over a dimension of ``GATHERED_ONCE``."""
    chain, gathers = dict.fromkeys(parameters), list[fx.Node]()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and len(sources) == 1 and sources[0] in chain:
            if node.target in _GATHERS and node.args[2] in GATHERED_ONCE:
                gathers.append(node)
            elif is_cast_or_view(node):
                chain[node] = None
    return list(chain), gathers


def _copied(graph: fx.Graph, given: Sequence[fx.Node], nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Write placeholders for the given nodes, and copies of others that are computed from these; return the copy of each."""
    copies = {node: graph.placeholder(node.name) for node in given}
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies


def _erase_unread(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase those of some calls without effects that nothing reads."""
    for node in reversed(nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


# -- scatters --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scattered:
    """How a backward scatters a gradient.

    Attributes:
        whole: what is scattered.
        steps: the collectives, casts, views and copies from ``whole`` to the gradient, in order.
        dtype: in which microbatches are added: that of the parameter, or of ``whole`` if that is wider.
    """

    whole: fx.Node
    steps: tuple[fx.Node, ...]
    dtype: torch.dtype

    @property
    def form(self) -> tuple[Hashable, ...]:
        """Computations of the steps; equal in the whole backward and in its half."""
        return self.whole.name, *((node.target, argument_key((node.args[1:], node.kwargs), str)) for node in self.steps)


def _scattered_last(graphs: DifferentiatedStage) -> DifferentiatedStage:
    """Return a stage whose backward gives the gradients of parameters whole, and the graph that scatters them.

    Scatters: (gradients of parameters...) -> ((gradients of parameters...),).
    """
    if graphs.backward is None or graphs.backward_weight is None:
        return graphs
    whole, half = _scatters(graphs.backward), _scatters(graphs.backward_weight)
    moved = {place: found for place, found in whole.items() if place in half and half[place].form == found.form}
    if not moved:
        return graphs
    return replace(
        graphs,
        scatters=_scattering(graphs.backward, moved),
        backward=_without_scatters(graphs.backward, moved),
        backward_weight=_without_scatters(graphs.backward_weight, {place: half[place] for place in moved}),
        received=tuple(sorted({*graphs.received}.difference(moved) | _in_use_elsewhere(graphs.backward, moved))),
    )


def _in_use_elsewhere(module: fx.GraphModule, moved: Mapping[int, _Scattered]) -> set[int]:
    """Return the places of gradients in whose memory other values may be before they are scattered: nothing is added to them in place."""
    memory, nodes = aliasing(module.graph), {node.name: node for node in module.graph.nodes}
    scattered = {found.steps[-1] for found in moved.values()}
    kept = [node for node in module.graph.output_node().all_input_nodes if node not in scattered]
    kept += [node for node in nodes.values() if node.op == "placeholder"]
    uses = Counter(storage for node in (*kept, *(found.whole for found in moved.values())) for storage in memory.storages[node.name])
    places = set[int]()
    for place, found in moved.items():
        of_whole, value = memory.storages[found.whole.name], found.whole.meta["val"]
        is_made = all(makes_memory(nodes[memory.first[storage]]) for storage in of_whole)
        if value.dtype == found.dtype and not (is_made and all(uses[storage] == 1 for storage in of_whole) and 0 not in value.stride()):
            places.add(place)
    return places


def _gradients(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """Return the gradients of parameters that a backward gives: its last result."""
    results = module.graph.output_node().args[0]
    assert isinstance(results, tuple)
    assert isinstance(results[-1], tuple)
    return results[-1]


def _scatters(module: fx.GraphModule) -> dict[int, _Scattered]:
    """Return place among the gradients of parameters -> how it is scattered, for all that are, over ``SCATTERED_ONCE``."""
    found = ((place, _scattered(node)) for place, node in enumerate(_gradients(module)))
    return {place: each for place, each in found if each is not None}


def _scattered(gradient: fx.Node) -> _Scattered | None:
    """Return how a gradient is scattered over a dimension of ``SCATTERED_ONCE``; None if it is not, or if a step is read besides."""
    steps: list[fx.Node] = []
    node, is_scattered = gradient, False
    while len(node.users) == 1 and len(node.all_input_nodes) == 1 and _is_linear(node):
        is_scattered = is_scattered or (node.target is reduce_scatter and node.args[2] in SCATTERED_ONCE)
        steps.insert(0, node)
        (node,) = node.all_input_nodes
    while steps and not (steps[0].target in _SUMS or (steps[0].target is _CAST and _dtype(steps[0]).itemsize < _dtype(node).itemsize)):
        node = steps.pop(0)  # a view, a copy, or a cast to the type in which microbatches are added
    return _Scattered(node, tuple(steps), torch.promote_types(_dtype(node), _dtype(gradient))) if is_scattered else None


_SUMS = frozenset({reduce_scatter, all_reduce})


def _is_linear(node: fx.Node) -> bool:
    """Return whether a step may come after the sum of the microbatches instead of before it."""
    return node.target in _SUMS or node.target is aten.clone.default or is_cast_or_view(node)


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _without_scatters(module: fx.GraphModule, moved: Mapping[int, _Scattered]) -> fx.GraphModule:
    """Return a backward that gives gradients as they are before they are scattered, in the type in which they are added."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = module.graph.output_node()
    for node in module.graph.nodes:
        if node is not result:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    gradients = [copies[node] for node in _gradients(module)]
    for place, found in moved.items():
        gradients[place] = _cast(copies[found.whole], found.whole.meta["val"], found.dtype)
    values = fx.map_arg(result.args[0][:-1], copies.__getitem__)  # type: ignore[index]
    graph.output((*values, tuple(gradients)))  # type: ignore[misc]
    for found in moved.values():
        for node in reversed(found.steps):
            graph.erase_node(copies[node])
    return _module(graph, module)


def _scattering(module: fx.GraphModule, moved: Mapping[int, _Scattered]) -> fx.GraphModule:
    """Return the graph that scatters the gradients that ``module`` gives whole: in its order, in which they are there."""
    graph = fx.Graph()
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    gradients = [graph.placeholder(f"{node.name}_of_batch") for node in _gradients(module)]
    for placeholder, node in zip(gradients, _gradients(module), strict=True):
        placeholder.meta["val"] = node.meta["val"]
    for place, found in sorted(moved.items(), key=lambda pair: position[pair[1].whole]):
        whole = found.whole.meta["val"]
        gradients[place].meta["val"] = added = whole.to(found.dtype)
        value = _cast(gradients[place], added, whole.dtype)
        for node in found.steps:
            value = graph.node_copy(node, dict.fromkeys(node.all_input_nodes, value).__getitem__)
            value.meta[FOR_ALL] = True
        gradients[place] = value
    graph.output((tuple(gradients),))
    return _module(graph, module, "Scatters")


def _cast(node: fx.Node, fake: torch.Tensor, dtype: torch.dtype) -> fx.Node:
    """Cast a value that is like ``fake``, if it has another type."""
    if fake.dtype == dtype:
        return node
    cast = node.graph.call_function(_CAST, (node,), {"dtype": dtype})
    cast.meta["val"] = fake.to(dtype)
    return cast
