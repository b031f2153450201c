"""Declared writes: the only calls of a graph that write memory are those that give a buffer, or a resident input, its new value.

    y, n = ...                                                     forward(batch, x)     the last forward of a step, or the only one
    copy_ = aten.copy_(buffer, n)                                  a declared write
    keys_1 = aten.index_copy_(keys, 2, position, new_keys)         a declared write of a part of a resident input: a cache

With microbatches each forward returns the new value after its outputs instead, and one write at the end of the step combines them
(``ModelGraph.updates``): the buffer is then as after one forward of the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from passes.graph.aliasing import Aliasing, aliasing, mutated_arguments, writes_statistics
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.provenance import place_of
from passes.ir.errors import VerificationError

aten = torch.ops.aten

_WRITES = frozenset({aten.copy_.default, aten.index_copy_.default})


def declared_writes(graph: fx.Graph, names: Collection[str] | None = None) -> dict[str, fx.Node]:
    """Return buffer placeholder -> the ``copy_`` that writes it, for the placeholders ``names``; None: for all."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    pairs = ((copy.args[0], copy) for copy in copies)
    return {buffer.name: copy for buffer, copy in pairs if _is_placeholder(buffer) and (names is None or buffer.name in names)}


def _is_placeholder(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")


def verify_writes(graph: fx.Graph, phase: str, *, owns_memory: bool = False) -> None:
    """Prove that no call of a graph writes memory, except the declared writes of buffers.

    Args:
        phase: the phase that has just rewritten the graph, for the error.
        owns_memory: whether calls may also write memory that the graph itself allocated, as sequential tiling does for its results.

    Raises:
        VerificationError: a call writes anything else.
    """
    memory: Aliasing | None = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        written = mutated_arguments(node)
        may_write_buffers = node.target in _WRITES or writes_statistics(node)
        if not written or (may_write_buffers and all(map(_is_placeholder, written))):
            continue
        if owns_memory:
            memory = memory or aliasing(graph)
            placeholders = [each for each in graph.nodes if _is_placeholder(each)]
            of_placeholders = {storage for each in placeholders for storage in memory.storages.get(each.name, ())}
            if all(memory.storages[each.name].isdisjoint(of_placeholders) for each in written):
                continue
        raise VerificationError(
            f"after {phase}, {node.name} writes {', '.join(each.name for each in written)} in place, and is no declared write of a buffer",
            place=place_of(node),
            remedy="this is a defect of the pass; please report it with the model",
        )


def returning_writes(module: fx.GraphModule, names: Collection[str]) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return a stage's graph that returns the new values of buffers ``names`` after its results instead of writing them.

    The second result has the names of those buffers that the stage wrote.
    """
    writes = declared_writes(module.graph, names)
    if not writes:
        return module, ()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output" and node not in writes.values():
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results: Any = fx.map_arg(module.graph.output_node().args[0], copies.__getitem__)
    values = tuple(copies[write.args[1]] for write in writes.values())  # type: ignore[index]
    graph.output((*results, *values))
    graph.lint()
    returning = LazyGraphModule({}, graph, class_name=type(module).__name__)
    returning.meta.update(module.meta)
    return returning, tuple(writes)


def writing_module(values: Mapping[str, fx.Node]) -> fx.GraphModule:
    """Return the graph that writes buffers at the end of a step: ``(*buffers, *new_values) -> ()``.

    ``values``: name of a buffer -> a node with the fake tensor of its value.
    """
    graph = fx.Graph()
    buffers = [graph.placeholder(name) for name in values]
    new_values = [graph.placeholder(f"{name}_new") for name in values]
    for buffer, new_value, like in zip(buffers, new_values, values.values(), strict=True):
        buffer.meta["val"] = new_value.meta["val"] = like.meta["val"]
        write = graph.call_function(aten.copy_.default, (buffer, new_value))
        write.meta["val"] = like.meta["val"]
    graph.output(())
    return LazyGraphModule({}, graph, class_name="WriteBuffers")
