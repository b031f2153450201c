"""Operations whose results depend on the microbatches even in a correct partition: BatchNorm and random numbers."""

from __future__ import annotations

from torch import fx

from partitioner.options.batch_statistics import first_names
from passes.graph.provenance import module_path
from passes.graph.schemas import bound_arguments, draws_random_numbers
from passes.ir.graph import ModelGraph


def differences_by_definition(graph: ModelGraph, n_microbatches: int) -> tuple[str, ...]:
    """Return a sentence for each reason why microbatches change the results; none if there is one microbatch."""
    if n_microbatches == 1:
        return ()
    reasons = (  # names of modules, sentence
        (graph.mixing.normalizations, "BatchNorm in training ({}) normalises over the rows of each microbatch"),
        ([module_path(node) for node in _random_nodes(graph)], "random numbers ({}) are drawn anew for each microbatch"),
    )
    return tuple(
        f"{reason.format(first_names(names))}: with {n_microbatches} microbatches the numbers differ from those of the whole batch by "
        "definition; compared here with the whole batch as one microbatch"
        for names, reason in reasons
        if names
    )


def draws_anything(graph: ModelGraph) -> bool:
    """Return whether a run of the graph draws random numbers."""
    return bool(_random_nodes(graph))


def _random_nodes(graph: ModelGraph) -> list[fx.Node]:
    return [node for node in graph.computing_nodes() if draws_random_numbers(node.target) and _draws(node)]


def _draws(node: fx.Node) -> bool:
    """Return whether a random op draws anything: dropout in evaluation, or with probability 0, does not."""
    bound = bound_arguments(node)
    return bound.get("train") is not False and not any(bound.get(name) == 0 for name in ("p", "dropout", "dropout_p"))
