"""Modules as constraints and ``recompute=`` name them."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from partitioner.planner.costs.memory.named_regions import Patterns, matches
from passes.graph.provenance import module_path, prefixes
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph


def check_module(name: str, known: Collection[str], said: str) -> None:
    """Raise ConfigError for a name that is not known, with those that are close to it; ``said``: what names it, a subject and a verb."""
    if name not in known:
        close = difflib.get_close_matches(name, sorted(known), n=3)
        raise ConfigError(
            f"{said} {name!r}, which is no module of the model",
            remedy=f"did you mean {' or '.join(map(repr, close))}?" if close else "write names as model.named_modules() gives them",
        )


def check_patterns(patterns: Patterns, modules: Collection[str], graph: ModelGraph) -> None:
    """Raise ConfigError for a pattern that matches no module.

    Args:
        modules: names of the model's modules, also of those that compute nothing.
    """
    known = {prefix for path in {*map(module_path, graph.computing_nodes()), *modules} for prefix in prefixes(path)} | {""}
    for pattern, _ in patterns:
        if not any(matches(name, pattern) for name in known):
            check_module(pattern, known, "recompute names")
