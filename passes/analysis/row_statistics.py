"""Find the normalisations that take their statistics over the rows of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import sympy
import torch
from torch import fx

from passes.graph.provenance import module_path
from passes.graph.schemas import bound_arguments, packet
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import ModelGraph

aten = torch.ops.aten
_BATCH_NORMS = (aten.batch_norm, aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm)


def takes_row_statistics(node: fx.Node) -> bool:
    """Return whether a call computes statistics over rows: batch norm in training, or instance norm that updates running statistics."""
    operator = packet(node.target)
    if operator in _BATCH_NORMS:
        return bool(bound_arguments(node)["training"])
    if operator is not aten.instance_norm:
        return False
    arguments = bound_arguments(node)
    return bool(arguments["use_input_stats"]) and arguments["running_mean"] is not None


def values_per_channel(graph: ModelGraph, rows: int) -> Iterator[tuple[str, int]]:
    """Yield (module path, number of values that share statistics) of each batch normalisation in training.

    Args:
        rows: rows of the batch that a statistic covers, such as those of a microbatch.
    """
    for node in graph.computing_nodes():
        if packet(node.target) in _BATCH_NORMS and takes_row_statistics(node):
            shape = bound_arguments(node)["input"].meta["val"].shape
            count = sympy.Integer(1) * math.prod(size_of(size) for index, size in enumerate(shape) if index != 1)
            count = count * rows / graph.batch_size if graph.batch is None else count.subs(graph.batch, rows)
            if not count.free_symbols:
                yield module_path(node), int(count)
