"""Check that what a loop over experts computes is row by row, and erase the marks around it.

Before:                                                     After:

    rows = partitioner.expert_rows(repeat_interleave)           y = partitioner.grouped_mm(repeat_interleave, w, group)
    chosen = partitioner.expert_rows(group)                     total = aten.sum(aten.view(y, [-1, 2, 8]), [1])
    y = partitioner.grouped_mm(rows, w, chosen)
    result = partitioner.end_of_expert_rows(y)
    total = aten.sum(aten.view(result, [-1, 2, 8]), [1])

The trace puts the tokens of all experts into one tensor, where the model gives each expert its own. The same is computed if each row is
computed by itself, which the rules of the operations say: a mean over the tokens of an expert, for example, is refused.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from passes.graph.provenance import place_of
from passes.graph.schemas import packet
from passes.ir.errors import TraceError
from passes.normalize.rows.row_dimension import REDUCED, UNREAD, row_dimension

__all__ = ["EXPERT_REMEDY", "ChosenExpertsError", "end_of_expert_rows", "erase_expert_rows", "expert_rows"]

for _name in ("expert_rows", "end_of_expert_rows"):
    torch.library.define(f"partitioner::{_name}", "(Tensor rows) -> Tensor")
    torch.library.impl(f"partitioner::{_name}", "CompositeExplicitAutograd", torch.clone)
    torch.library.register_fake(f"partitioner::{_name}", torch.empty_like)

expert_rows = torch.ops.partitioner.expert_rows.default
"""Marks a tensor whose first dimension goes over the pairs of a token and an expert that it chose: those of all experts."""

end_of_expert_rows = torch.ops.partitioner.end_of_expert_rows.default
"""Marks what an expert gives for them, in front of the sum over the experts of each token."""

EXPERT_REMEDY = (
    "let the body of the loop be the same for every expert, row by row: rows = x[token], y = experts[number](rows) * weights[token, place, "
    "None], result.index_add_(0, token, y); or sort the tokens by expert and multiply them with torch.nn.functional.grouped_mm"
)
"""What to do about a loop over experts that is not traced."""


class ChosenExpertsError(Exception):
    """A loop over experts asks something that its one product for all tokens cannot answer."""


_MARKS = (expert_rows, end_of_expert_rows)


def erase_expert_rows(graph: fx.Graph) -> None:
    """Erase the marks, in place.

    Raises:
        TraceError: rows between them meet.
    """
    if not any(node.target in _MARKS for node in graph.nodes):
        return
    rows: dict[fx.Node, int] = {}
    for node in graph.nodes:
        sources = {source: rows[source] for source in node.all_input_nodes if source in rows}
        if node.target is expert_rows:
            rows[node] = 0
        elif sources and node.target is not end_of_expert_rows:
            dimension = _dimension(node, sources)
            if dimension is None or dimension == REDUCED:
                raise TraceError(
                    f"the loop over the experts that some token chose mixes the tokens of an expert ({packet(node.target) or node.name})",
                    place=place_of(node),
                    remedy=EXPERT_REMEDY,
                )
            if dimension != UNREAD:
                rows[node] = dimension
        elif sources and set(sources.values()) != {0}:
            raise TraceError("a loop over experts adds up another dimension than its tokens", place=place_of(node), remedy=EXPERT_REMEDY)
    for node in list(graph.nodes):
        if node.target in _MARKS:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def _dimension(node: fx.Node, sources: dict[fx.Node, int]) -> int | None:
    """Return where the rows are in the results of a node; None if they meet."""
    if node.target is operator.getitem:
        return next(iter(sources.values()))
    if node.op != "call_function":
        return None
    return row_dimension(node, sources)
