"""Peak memory of a forward or a training step, by liveness: a value is dropped after its last reader.

x = conv(image)       image x
y = relu(x)           image x y       the most: x and y beside the image
z = pool(y)           image   y z
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from passes.analysis.lifetimes import held_at, lifetimes
from passes.autograd.partition_joint import DifferentiatedStage
from passes.graph.aliasing import memory_keys
from passes.graph.symbolic_sizes import size_at
from passes.ir.graph import ModelGraph


def given_bytes(graph: ModelGraph) -> int:
    """Return the bytes of inputs and parameters, which are held throughout."""
    return _bytes_of_all([node for node in graph.graph.nodes if node.op == "placeholder"], graph)


def forward_peak(graph: ModelGraph) -> int:
    """Return the peak bytes of a forward at the traced batch, with inputs, parameters and results."""
    return _peak(list(graph.graph.nodes), graph)


def step_peak(training: DifferentiatedStage, graph: ModelGraph) -> int:
    """Return the peak bytes of a forward and its backward, with inputs, parameters and gradients, without the loss.

    Args:
        training: the whole model as one stage.
        graph: whose batch it is.
    """
    backward = [] if training.backward is None else list(training.backward.graph.nodes)
    return _peak([*training.forward.graph.nodes, *backward], graph)


def _peak(order: Sequence[fx.Node], graph: ModelGraph) -> int:
    """Return the peak bytes of nodes run in order. Placeholders of a backward share memory with the values that the forward saved."""
    keys = {node: memory_keys(node) for node in order}
    sizes = {key: _bytes(tensor, graph) for pairs in reversed(keys.values()) for tensor, key in pairs}
    given = {key for node in itertools.takewhile(lambda node: node.op == "placeholder", order) for _, key in keys[node]}
    touched = ([key for source in (node, *node.all_input_nodes) for _, key in keys[source]] for node in order)
    made = [(lifetime, sizes[key]) for key, lifetime in lifetimes(touched).items() if key not in given]
    return sum(sizes[key] for key in given) + max(held_at(len(order), made), default=0)


def _bytes_of_all(nodes: Iterable[fx.Node], graph: ModelGraph) -> int:
    found = {key: tensor for node in nodes for tensor, key in memory_keys(node)}
    return sum(_bytes(tensor, graph) for tensor in found.values())


def _bytes(tensor: torch.Tensor, graph: ModelGraph) -> int:
    return size_at(tensor.untyped_storage().nbytes(), graph.batch, graph.batch_size)
