"""Tables of which a model may take a part by a size that its trace has made a number.

table[:, :height, :width]     traced for images of 8 x 8:     aten.slice(aten.slice(table, 1, 0, 8), 2, 0, 8)
"""

from __future__ import annotations

import sys

from torch import fx
from torch.export import ExportedProgram

from passes.graph.schemas import bound_arguments, packet
from passes.ir.torch_private import OpOverload
from passes.normalize.symbolic_batch import TAKING

__all__ = ["takes_of_weights"]


def takes_of_weights(program: ExportedProgram) -> bool:
    """Return whether a program slices a table that it computes from weights alone: several elements of a dimension, from the start."""
    inputs = set(program.graph_signature.user_inputs)
    of_weights: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in inputs:
            of_weights.add(node)
        elif node.op == "call_function" and node.all_input_nodes and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
            if isinstance(node.target, OpOverload) and packet(node.target) in TAKING and _takes_some(node):
                return True
    return False


def _takes_some(node: fx.Node) -> bool:
    """Return whether a call may take a number of elements from the start."""
    bound = bound_arguments(node)
    if "end" not in bound:
        return "tensors" not in bound  # what is joined of weights alone is the same for every size
    return bound["start"] in (None, 0) and isinstance(bound["end"], int) and 1 < bound["end"] < sys.maxsize
