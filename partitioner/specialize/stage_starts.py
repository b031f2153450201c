"""Find where stages begin in a graph, given the parameters that the ranks of each stage hold.

held            embed, layers 0 and 1    |   layers 2 and 3, head
another graph   embed, layer 0, adapter, layer 1 | layer 2, layer 3, head         the cut that sends fewest bytes
                head of the first stage          | (nothing)                      a stage may compute nothing
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from torch import Tensor, fx

from passes.analysis.replicable import replicable_nodes
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.graph import ModelGraph
from passes.ir.plan import Stage
from passes.stages.split import stage_of_nodes

__all__ = ["reads_where_held", "stages_where_held"]

_EMPTY = 1e-6
"""Bytes that an empty stage counts as: of cuts that send as many bytes, the one with fewest empty stages is taken."""


def reads_where_held(graph: ModelGraph, first_nodes: Sequence[str], held: Sequence[frozenset[str]]) -> bool:
    """Return whether each stage reads only parameters that its ranks hold.

    Args:
        held: for each stage, the names of the parameters; a name that is in none of them may be read anywhere.
    """
    known, stages = frozenset[str]().union(*held), stage_of_nodes(graph, first_nodes)
    return all(_read(graph, node, known) <= held[stages[node.name]] for node in graph.computing_nodes() if node.name in stages)


def _read(graph: ModelGraph, node: fx.Node, known: frozenset[str]) -> frozenset[str]:
    return known.intersection(graph.parameters[each.name] for each in node.all_input_nodes if each.name in graph.parameters)


def stages_where_held(graph: ModelGraph, stages: Sequence[Stage], held: Sequence[frozenset[str]]) -> tuple[Stage, ...] | None:
    """Return the stages with the first nodes that they have in a graph; None if there is no such cut.

    Each parameter is read in a stage that holds it; of all such cuts the one that sends fewest bytes is taken.

    Args:
        held: see ``reads_where_held``.
    """
    nodes, known, last = graph.computing_nodes(), frozenset[str]().union(*held), len(stages) - 1
    across = _bytes_across(graph, nodes)
    best = [_EMPTY * stage for stage in range(len(stages))]  # bytes sent so far, if the present node is in a stage
    entered: list[list[int]] = []  # the stage of the node before, on the best way to a node in a stage
    for index, node in enumerate(nodes):
        read, before = _read(graph, node, known), best
        sources = [min(range(stage + 1), key=lambda source: _sent(before, source, stage, across[index])) for stage in range(len(stages))]
        if not index:
            sources = list(range(len(stages)))
        entered.append(sources)
        sent = [_sent(before, source, stage, across[index]) for stage, source in enumerate(sources)]
        best = [each if read <= names else math.inf for each, names in zip(sent, held, strict=True)]
    stage = min(range(len(stages)), key=lambda each: best[each] + _EMPTY * (last - each))
    if math.isinf(best[stage]):
        return None
    of_nodes: list[int] = []
    for sources in reversed(entered):
        of_nodes.append(stage)
        stage = sources[stage]
    return tuple(dataclasses.replace(each, first_node=_first(graph, nodes, of_nodes[::-1], index)) for index, each in enumerate(stages))


def _sent(best: Sequence[float], source: int, stage: int, across: float) -> float:
    """Return the bytes that are sent until a node in a stage, if the node before it is in the stage ``source``."""
    return best[stage] if source == stage else best[source] + across + _EMPTY * (stage - source - 1)


def _first(graph: ModelGraph, nodes: Sequence[fx.Node], stages: Sequence[int], stage: int) -> str:
    """Return the name of the first node of a stage; of one that computes nothing, that of what follows it."""
    return next((node.name for node, each in zip(nodes, stages, strict=True) if each >= stage), graph.graph.output_node().name)


def _bytes_across(graph: ModelGraph, nodes: Sequence[fx.Node]) -> list[float]:
    """Return for each node the bytes that a stage which begins with it receives from earlier ones; infinity if it would read a tuple."""
    replicable, positions = replicable_nodes(graph), {node: index for index, node in enumerate(nodes)}
    changes, within_tuples = [0] * (len(nodes) + 1), set[int]()
    for index, node in enumerate(nodes):
        value = node.meta.get("val")
        last = max((positions[user] for user in node.users if user in positions), default=index)
        if isinstance(value, tuple | list):
            within_tuples.update(range(index + 1, last + 1))
        elif node.name not in replicable and isinstance(value, Tensor):
            size = bytes_of(value, graph.batch, graph.batch_size)
            changes[index + 1] += size
            changes[last + 1] -= size
    return [math.inf if index in within_tuples else size for index, size in enumerate(itertools.accumulate(changes[:-1]))]
