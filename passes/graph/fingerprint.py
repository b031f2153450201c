"""Digests of a traced graph and of a model's weights.

``graph_digest`` covers every op with its arguments and sizes. Two processes that trace the same model with the same inputs get the same
digest: it leaves out devices, the name of the batch symbol, addresses of functions, and ``requires_grad``.

``weights_digest`` covers the names and shapes of parameters and buffers, and no nodes: a model has fewer nodes in evaluation, and a plan
that was made in training still fits.
"""

from __future__ import annotations

import hashlib
import re
from types import FunctionType

from torch import Tensor, fx

from passes.ir.graph import ModelGraph

__all__ = ["graph_digest", "target_name", "weights_digest"]


_PROCESS_SPECIFIC = re.compile(r"device\(type='\w+'(?:, index=\d+)?\)|\bat 0x[0-9a-f]+")
"""A device, and the address of an object."""


def graph_digest(graph: ModelGraph) -> str:
    """Return a short digest of a graph: equal for equal graphs, in every process."""
    lines = [f"{graph.batch is None} {graph.batch_size} {graph.training} {graph.autocast and graph.autocast.dtype} {weights_digest(graph)}"]
    lines += [f"{node.op} {node.name} {target_name(node)} {node.args} {node.kwargs} {_sizes(node)}" for node in graph.graph.nodes]
    text = _PROCESS_SPECIFIC.sub("", "\n".join(lines))
    if graph.batch is not None:
        text = re.sub(rf"\b{re.escape(str(graph.batch))}\b", "batch", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def target_name(node: fx.Node) -> str:
    """Return the name of what a node calls; for a Python function without the address that ``str`` prints."""
    return f"{node.target.__module__}.{node.target.__qualname__}" if isinstance(node.target, FunctionType) else str(node.target)


def _sizes(node: fx.Node) -> str:
    """Return dtype and shape of each tensor of a node's value."""
    value = node.meta.get("val")
    leaves = value if isinstance(value, tuple | list) else (value,)
    return ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor))


def weights_digest(graph: ModelGraph) -> str:
    """Return a short digest of a model's weights: equal for equal names and shapes, on every machine."""
    shapes = {node.name: tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.op == "placeholder" and node.name != "batch"}
    weights = sorted((name, str(shapes.get(key))) for key, name in (*graph.parameters.items(), *graph.buffers.items()))
    return hashlib.sha256(repr((weights, sorted(graph.aliases.items()))).encode()).hexdigest()[:16]
