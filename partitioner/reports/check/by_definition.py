"""What microbatches compute differently from the whole batch, however correct the partitioned model is."""

from __future__ import annotations

from torch import fx

from partitioner.options.batch_statistics import first_names
from passes.graph.provenance import module_path
from passes.graph.schemas import bound_arguments, draws_random_numbers
from passes.ir.graph import ModelGraph

__all__ = ["differences_by_definition", "draws_anything"]


def differences_by_definition(graph: ModelGraph, n_microbatches: int) -> tuple[str, ...]:
    """One sentence for each reason why microbatches give other numbers; none when there is one microbatch."""
    if n_microbatches == 1:
        return ()
    reasons = (
        (graph.mixing.normalizations, "BatchNorm in training ({}) normalises over the rows of each microbatch"),
        ([module_path(node) for node in _drawing(graph)], "random numbers ({}) are drawn anew for each microbatch"),
    )
    return tuple(
        f"{reason.format(first_names(found))}: with {n_microbatches} microbatches the numbers differ from those of the whole batch by "
        "definition; compared here with the whole batch as one microbatch"
        for found, reason in reasons
        if found
    )


def draws_anything(graph: ModelGraph) -> bool:
    """Whether a run of the graph draws random numbers."""
    return bool(_drawing(graph))


def _drawing(graph: ModelGraph) -> list[fx.Node]:
    return [node for node in graph.computing_nodes() if draws_random_numbers(node.target) and _is_switched_on(node)]


def _is_switched_on(node: fx.Node) -> bool:
    bound = bound_arguments(node)
    return bound.get("train") is not False and not any(bound.get(name) == 0 for name in ("p", "dropout", "dropout_p"))
