"""What tells one model from another: the names and shapes of its parameters and buffers.

Nodes are left out: in evaluation a model has fewer of them, and a plan that was made in training still fits.
"""

from __future__ import annotations

import hashlib

from passes.ir.graph import ModelGraph

__all__ = ["weights_digest"]


def weights_digest(graph: ModelGraph) -> str:
    """A short digest: equal for equal names and shapes, on every machine."""
    shapes = {node.name: tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.op == "placeholder" and node.name != "batch"}
    held = sorted((name, str(shapes.get(key))) for key, name in (*graph.parameters.items(), *graph.buffers.items()))
    return hashlib.sha256(repr((held, sorted(graph.aliases.items()))).encode()).hexdigest()[:16]
