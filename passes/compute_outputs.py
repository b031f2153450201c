"""Let every tensor that the model returns be the result of a node, so that a stage computes it.

Before:                          After:

    return (x, linear)               alias = aten.alias(x)
                                     return (alias, linear)

What is returned as it was given (an input, a parameter, a buffer) is otherwise nobody's result.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

__all__ = ["compute_outputs"]


def compute_outputs(graph: fx.Graph) -> None:
    """Put an alias behind every tensor placeholder that the output reads, in place."""
    output = graph.output_node()
    for placeholder in dict.fromkeys(output.all_input_nodes):
        if placeholder.op == "placeholder" and isinstance(placeholder.meta.get("val"), Tensor):
            with graph.inserting_before(output):
                alias = graph.call_function(torch.ops.aten.alias.default, (placeholder,))
            alias.meta = dict(placeholder.meta)
            output.replace_input_with(placeholder, alias)
