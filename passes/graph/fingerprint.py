"""What tells one traced model from another: every operation with its arguments and sizes.

Two processes that trace the same model with the same inputs have the same digest, wherever each holds them: devices are left out, and so is
what a process calls the batch, where Python keeps a function, and what requires a gradient.

What tells one model from another: the names and shapes of its parameters and buffers.

Nodes are left out: in evaluation a model has fewer of them, and a plan that was made in training still fits.
"""

from __future__ import annotations

import hashlib
import re
from types import FunctionType

from torch import Tensor, fx

from passes.ir.graph import ModelGraph

__all__ = ["graph_digest", "target_name", "weights_digest"]


_OF_THE_PROCESS = re.compile(r"device\(type='\w+'(?:, index=\d+)?\)|\bat 0x[0-9a-f]+")
"""A device, and the address of an object."""


def graph_digest(graph: ModelGraph) -> str:
    """A short digest: equal for equal graphs, in every process."""
    lines = [f"{graph.batch is None} {graph.batch_size} {graph.training} {graph.autocast and graph.autocast.dtype} {weights_digest(graph)}"]
    lines += [f"{node.op} {node.name} {target_name(node)} {node.args} {node.kwargs} {_sizes(node)}" for node in graph.graph.nodes]
    text = _OF_THE_PROCESS.sub("", "\n".join(lines))
    if graph.batch is not None:
        text = re.sub(rf"\b{re.escape(str(graph.batch))}\b", "batch", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def target_name(node: fx.Node) -> str:
    """What a node calls, without addresses, which Python prints of functions."""
    return f"{node.target.__module__}.{node.target.__qualname__}" if isinstance(node.target, FunctionType) else str(node.target)


def _sizes(node: fx.Node) -> str:
    value = node.meta.get("val")
    leaves = value if isinstance(value, tuple | list) else (value,)
    return ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor))


# -- what tells one model from another ---------------------------------------------------------------------------------------------


def weights_digest(graph: ModelGraph) -> str:
    """A short digest: equal for equal names and shapes, on every machine."""
    shapes = {node.name: tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.op == "placeholder" and node.name != "batch"}
    held = sorted((name, str(shapes.get(key))) for key, name in (*graph.parameters.items(), *graph.buffers.items()))
    return hashlib.sha256(repr((held, sorted(graph.aliases.items()))).encode()).hexdigest()[:16]
