"""Regions of recomputation that the model marks with ``torch.utils.checkpoint``, or that the caller names by module.

recompute={"layers.*": "full", "layers.*.attention": "selective"}

embedding | norm | attention | mlp | norm | attention | mlp | head
none        full   selective   full  full   selective   full  none       policies: that of the innermost module that a pattern matches
            ^ layers.0               ^ layers.1               ^ none     regions begin with the outermost such module
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

from torch import fx

from cost_models.graph_cost import nodes_with_gradient
from passes.graph.provenance import checkpoint_of, is_saved_by_checkpoint, module_path, prefixes
from passes.ir.graph import ModelGraph
from passes.ir.plan import Region

Patterns = tuple[tuple[str, str], ...]
"""Pairs of a pattern of module paths and a policy. ``*`` matches within one name between dots; ``""`` is the whole model."""


class _Fate(NamedTuple):
    """The region of a node, None outside of all, and its policy."""

    region: str | None
    policy: str


def named_regions(graph: ModelGraph, patterns: Patterns) -> tuple[Region, ...]:
    """Return the regions of a graph, in order: by the patterns, or without any, those that the model marks.

    Nodes outside of all regions are not recomputed.
    """
    nodes = graph.computing_nodes()
    fates = [_fate_by_module(node, patterns) for node in nodes] if patterns else _marked_fates(nodes)
    regions = list[Region]()
    last: _Fate | None = None
    for node, fate in zip(nodes, fates, strict=True):
        if fate != last:
            is_joined = last is not None and fate.region == last.region
            regions.append(Region(node.name, fate.policy, is_joined))
            last = fate
    return tuple(regions)


def has_checkpoints(graph: ModelGraph) -> bool:
    """Return whether the model marks a region."""
    return any(checkpoint_of(node) is not None for node in graph.computing_nodes())


def policy_key(node: fx.Node, patterns: Patterns) -> Hashable:
    """Return the properties in which corresponding nodes of repeated blocks must agree to be recomputed alike."""
    return _fate_by_module(node, patterns).policy if patterns else (checkpoint_of(node) is not None, is_saved_by_checkpoint(node))


def _marked_fates(nodes: Sequence[fx.Node]) -> list[_Fate]:
    """Return the fates by the model's marks.

    An unmarked node between two nodes of one checkpoint, such as a size, belongs to that checkpoint.
    """
    marks = list(map(checkpoint_of, nodes))
    marked = [index for index, mark in enumerate(marks) if mark is not None]
    for before, after in pairwise(marked):
        if marks[before] == marks[after]:
            marks[before:after] = [marks[before]] * (after - before)
    kept = (mark is None or is_saved_by_checkpoint(node) for node, mark in zip(nodes, marks, strict=True))
    return [_Fate(mark, "none" if is_kept else "full") for mark, is_kept in zip(marks, kept, strict=True)]


def _fate_by_module(node: fx.Node, patterns: Patterns) -> _Fate:
    path = module_path(node)
    found = [(name, policy) for name in ("", *prefixes(path)) for pattern, policy in patterns if matches(name, pattern)]
    return _Fate(found[0][0], found[-1][1]) if found else _Fate(None, "none")


def matches(name: str, pattern: str) -> bool:
    """Return whether the path of a module matches a pattern."""
    names, parts = name.split("."), pattern.split(".")
    return len(names) == len(parts) and all(map(fnmatchcase, names, parts))


def patterns_without_effect(patterns: Patterns, graph: ModelGraph) -> list[str]:
    """Return the patterns of modules to recompute that need no gradient, such as frozen parts."""
    reaching = nodes_with_gradient(graph)
    paths = {module_path(node) for node in graph.computing_nodes() if node.name in reaching}
    reached = {name for path in paths for name in ("", *prefixes(path))}
    return [pattern for pattern, policy in patterns if policy != "none" and not any(matches(name, pattern) for name in reached)]
