"""Differentiate each reader's cast by itself where readers share one, so that autograd adds their gradients as it does for the model.

    a stage                          differentiated as                the joint graph, after

    to = to(norm, bfloat16)          to = to(norm, bfloat16)          to = to(norm, bfloat16)
    q = linear(to, w_q)              q = linear(to, w_q)              q = linear(to, w_q)
    k = linear(to, w_k)              to_1 = to(norm, bfloat16)        k = linear(to, w_k)
                                     k = linear(to_1, w_k)            norm_gradient = to(q's, float32) + to(k's, float32)

Autocast casts the arguments of each operation by itself. ``passes.normalize.shared.equal_computations`` shares equal casts, and marks the
readers of all but the first. A reader of a value that is gathered from ranks, or one in another stage, keeps the shared cast.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, fx

from passes.autograd.trace_joint import Joint
from passes.graph.fake_tensors import FakeTensorCache, fake_mode
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.normalize.shared.equal_computations import OWN_CASTS, SHARED_CAST
from passes.stages.split import StageGraph

_COPY_OF = "copy_of_cast"
"""Key in ``node.meta`` of a copy: the name of the shared cast."""


def with_own_casts(stage: StageGraph) -> StageGraph:
    """Return a stage in which marked readers have casts of their own."""
    graph = stage.module.graph
    if not any(OWN_CASTS in node.meta for node in graph.nodes):
        return stage
    target, copies, own = fx.Graph(), dict[fx.Node, fx.Node](), dict[tuple[fx.Node, int], fx.Node]()
    with fake_mode(graph):
        for node in graph.nodes:
            reads = {source: _own_cast(source, node, target, copies, own) for source in node.all_input_nodes}
            copies[node] = target.node_copy(node, reads.__getitem__)
    target.lint()
    module = LazyGraphModule({}, target, class_name=f"Stage{stage.index}")
    module.meta.update(stage.module.meta)
    return dataclasses.replace(stage, module=module)


def _own_cast(
    source: fx.Node, reader: fx.Node, target: fx.Graph, copies: dict[fx.Node, fx.Node], own: dict[tuple[fx.Node, int], fx.Node]
) -> fx.Node:
    """Return the value that a reader reads in the new graph, and write its cast there if it has one of its own."""
    number = reader.meta.get(OWN_CASTS, {}).get(source.meta.get(SHARED_CAST), 0)
    if not number or not _is_cast(source):
        return copies[source]
    if (source, number) not in own:
        arguments, name = fx.map_arg(source.args, copies.__getitem__), f"{source.name}_of_{reader.name}"  # all others keep their names
        cast = target.create_node(source.op, source.target, arguments, fx.map_arg(source.kwargs, copies.__getitem__), name=name)
        cast.meta = {**source.meta, _COPY_OF: source.name}
        FakeTensorCache().describe(cast)
        own[source, number] = cast
    return own[source, number]


def _is_cast(node: fx.Node) -> bool:
    """Return whether a value that has the mark of a shared cast is that cast, and not its gathered copy or a placeholder for it."""
    sources = [each.meta["val"] for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
    return len(sources) == 1 and sources[0].dtype != node.meta["val"].dtype


def with_shared_casts(joint: Joint) -> Joint:
    """Return the joint graph, changed in place, with one cast for all readers again."""
    copy_of = {node.name: node.meta[_COPY_OF] for node in joint.stage.module.graph.nodes if _COPY_OF in node.meta}
    nodes = {name: node for node, name in joint.sources.items()}
    merged: set[fx.Node] = set()
    for name, shared in copy_of.items():
        copy, first = nodes.get(name), nodes.get(shared)
        if copy is not None and first is not None and _call(copy) == _call(first):
            copy.replace_all_uses_with(first)
            joint.graph.erase_node(copy)
            merged.add(copy)
    return dataclasses.replace(joint, sources={node: name for node, name in joint.sources.items() if node not in merged})


def _call(node: fx.Node) -> tuple[object, ...]:
    return node.target, node.args, node.kwargs
