"""The most memory that a forward holds at once, by liveness: a value is forgotten behind its last reader.

x = conv(image)       image x
y = relu(x)           image x y       the most: x and y beside the image
z = pool(y)           image   y z
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from passes.aliasing import Allocations, allocations
from passes.ir.graph import ModelGraph

__all__ = ["forward_peak", "given_bytes"]


def given_bytes(graph: ModelGraph) -> int:
    """Bytes of inputs and parameters, which are held throughout."""
    memory = allocations(graph.graph)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return _total({allocation for node in placeholders for allocation in memory.lies_in.get(node.name, ())}, memory, graph)


def forward_peak(graph: ModelGraph) -> int:
    """Bytes at the worst node, inputs, parameters and results among them, for the batch that was traced."""
    memory = allocations(graph.graph)
    order = list(graph.graph.nodes)
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for place, node in enumerate(order):
        for allocation in memory.lies_in.get(node.name, ()):
            first.setdefault(allocation, place)
        for source in (node, *node.all_input_nodes):
            for allocation in memory.lies_in.get(source.name, ()):
                last[allocation] = place
    held = {allocation for node in order if node.op == "placeholder" for allocation in memory.lies_in.get(node.name, ())}
    live = _total(held, memory, graph)
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for allocation, place in first.items():
        if allocation not in held:
            begins.setdefault(place, []).append(allocation)
            ends.setdefault(last[allocation], []).append(allocation)
    most = live
    for place in range(len(order)):
        live += _total(begins.get(place, ()), memory, graph)
        most = max(most, live)
        live -= _total(ends.get(place, ()), memory, graph)
    return most


def _total(found: Iterable[int], memory: Allocations, graph: ModelGraph) -> int:
    return sum(_bytes(memory.bytes[allocation], graph) for allocation in found)


def _bytes(size: object, graph: ModelGraph) -> int:
    if isinstance(size, int):
        return size
    return int(sympy.sympify(size).subs(graph.batch, graph.batch_size))
