"""Patterns of modules that ``recompute=`` names."""

from __future__ import annotations

from collections.abc import Collection

from partitioner.planner.constraints.modules import check_module
from partitioner.planner.costs.memory.named_regions import Patterns, matches
from passes.graph.provenance import module_path, prefixes
from passes.ir.graph import ModelGraph

__all__ = ["check_patterns"]


def check_patterns(patterns: Patterns, modules: Collection[str], graph: ModelGraph) -> None:
    """Raise ConfigError for a pattern that matches no module.

    Args:
        modules: names of the model's modules, also of those that compute nothing.
    """
    known = {prefix for path in {*map(module_path, graph.computing_nodes()), *modules} for prefix in prefixes(path)} | {""}
    for pattern, _ in patterns:
        if not any(matches(name, pattern) for name in known):
            check_module(pattern, known, "recompute names")
