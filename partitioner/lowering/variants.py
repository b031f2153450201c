"""The lowered programs of a partitioned model, one set for each kind of batch and use, made when first asked for."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

from partitioner.lowering.lowering import Lowering
from partitioner.options.batch_rows import Inputs, RowParts
from partitioner.options.batch_statistics import check_values_per_channel
from passes.ir.graph import ModelGraph, Results
from passes.ir.plan import Plan

__all__ = ["LowerAt", "Lowerings", "Variant", "first_variant", "results_in_training", "variant_for"]

LowerAt = Callable[["Variant"], Lowering]
"""Lowers the plan for one variant of the graph."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way in which the model is lowered.

    Attributes:
        batch_size: for a graph that is fixed to one size, the rows of one microbatch over all ranks; else None.
        in_parts: whether means over the batch that the model returns are sums of parts (``passes.spmd.mean_to_sum``).
        results: what ranks return that cut the batch.
        rows: whether the mesh cuts the batch; it does not cut one that it does not divide.
        inputs: whether processes pass the whole batch and get whole results, or pass and get their own rows.
    """

    batch_size: int | None
    in_parts: bool
    results: Results
    rows: bool
    inputs: Inputs


def results_in_training(graph: ModelGraph) -> Results:
    """What ranks return to a loss: their own rows, unless the model returns means, or what no rank can tell from its rows alone."""
    kinds = {output.combine for output in graph.outputs}
    return "rows" if kinds & {"mean", "sum"} else "whole" if "mixed" in kinds else "loss"


class Lowerings:
    """What a model has lowered so far.

    Args:
        graph: the model.
        plan: where its nodes run.
        lower_at: lowers one variant.
        trace_again: traces the model for so many rows; None: as it was traced.
        inputs: what each process passes.
    """

    def __init__(
        self, graph: ModelGraph, plan: Plan, lower_at: LowerAt, trace_again: Callable[[int | None], ModelGraph], inputs: Inputs = "global"
    ) -> None:
        self._graph = graph
        self.trace_again = trace_again
        self._plan = plan
        self._lower_at = lower_at
        self.rows = RowParts(plan.grid, inputs)
        self._kept: dict[Variant, Lowering] = {}
        self._checked: set[tuple[int, int]] = set()

    def with_microbatches(self, count: int | None) -> Lowerings:
        """The same programs, for batches that every process passes whole, cut into so many microbatches; None: as the plan says."""
        plan = self._plan if count is None else dataclasses.replace(self._plan, n_microbatches=count)
        other = Lowerings(self._graph, plan, self._lower_at, self.trace_again)
        other._kept = self._kept
        return other

    def for_batch(self, batch: int, *, in_parts: bool = True, results: Results = "rows") -> tuple[int, Lowering]:
        """How many microbatches a batch of this size has, and the programs that serve them; see ``variant_for``."""
        count, variant = variant_for(self._graph, self._plan, self.rows, batch, in_parts=in_parts, results=results)
        if (batch, count) not in self._checked:
            check_values_per_channel(self._graph, self._plan, self.rows, batch, count)
            self._checked.add((batch, count))
        if not variant.rows:
            warnings.warn(f"a batch of {batch} rows does not divide over {self.rows.count} ranks: each computes all of it", stacklevel=4)
        if variant not in self._kept:
            self._kept[variant] = self._lower_at(variant)
        return count, self._kept[variant]


def variant_for(
    graph: ModelGraph, plan: Plan, parts_of_rows: RowParts, batch: int, *, in_parts: bool = True, results: Results = "rows"
) -> tuple[int, Variant]:
    """How many microbatches a batch has, and the way in which a model is lowered for them.

    At most the plan's number, and no more than rows. Where the graph is fixed to one size, microbatches are all equal.

    Args:
        in_parts: let means over the batch that the model returns be sums over microbatches and ranks.
        results: what ranks return that cut the batch.
    """
    rows = parts_of_rows.divides(batch)
    parts = parts_of_rows.count if rows else 1
    count = min(plan.n_microbatches, batch // parts)
    size = None
    if graph.batch is None:
        count = next(divisor for divisor in range(count, 0, -1) if batch // parts % divisor == 0)
        size = batch // count
    cut = count > 1 or parts > 1
    means = any(output.combine == "mean" for output in graph.outputs)
    return count, Variant(size, in_parts and cut and means, results, rows, parts_of_rows.inputs)


def first_variant(graph: ModelGraph, plan: Plan, inputs: Inputs = "global") -> Variant:
    """The way in which a model is lowered for the plan's own batch."""
    rows = RowParts(plan.grid, inputs)
    return variant_for(graph, plan, rows, plan.batch_size, results=results_in_training(graph) if graph.training else "rows")[1]
