"""Choose the variant of a model that serves a batch, and lower each variant when it is first used."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

from partitioner.options.batch_rows import Inputs, RowParts
from partitioner.options.batch_statistics import check_values_per_channel
from partitioner.specialize.sharded_model import ShardedModel
from passes.ir.errors import level_of_caller
from passes.ir.graph import ModelGraph, Results
from passes.ir.plan import Plan
from passes.normalize.loss_alone import results_in_parts, results_of_step

__all__ = ["LowerAt", "Programs", "Variant", "first_variant", "results_in_training", "variant_for"]

LowerAt = Callable[["Variant"], ShardedModel]
"""Lowers the plan for one variant of the graph."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """Options by which the model is lowered for a kind of batch.

    Attributes:
        batch_size: for a batch that the traced graph does not serve, the rows of one microbatch over all ranks; else None.
        whole_batch: for such a batch, the rows of all microbatches; else None.
        in_parts: whether returned means over the batch are computed as sums of parts (``passes.spmd.mean_to_sum``): of microbatches, of the
            rows of ranks, or of the part of each row that a rank has.
        results: what each rank of a sharded batch returns.
        rows: whether the batch is sharded over ranks; False if it does not divide.
        inputs: whether processes pass the whole batch and get whole results, or pass and get their own rows.
        kept: the indices of the results that are returned, for a step that reads no others; None: all are.
    """

    batch_size: int | None
    whole_batch: int | None
    in_parts: bool
    results: Results
    rows: bool
    inputs: Inputs
    kept: tuple[int, ...] | None = None


def results_in_training(graph: ModelGraph) -> Results:
    """Return what ranks return in training: ``"rows"`` if an output is a mean or sum, else ``"whole"`` if one is mixed, else ``"loss"``.

    Of a model that returns its loss, this output alone counts.
    """
    kept = results_of_step(graph)
    kinds = {output.combine for index, output in enumerate(graph.outputs) if output.destination is None and (kept is None or index in kept)}
    if kinds & {"mean", "sum"}:
        return "rows"
    return "whole" if "mixed" in kinds else "loss"


class Programs:
    """Caches the lowered programs of each variant of a model.

    Args:
        graph: the model.
        plan: by which it is lowered.
        lower_at: lowers one variant.
        trace_again: traces the model for a number of rows; None: as it was traced.
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
        self._lowered: dict[Variant, ShardedModel] = {}
        self._checked: set[tuple[int, int]] = set()  # (batch size, microbatches)

    def with_microbatches(self, count: int | None) -> Programs:
        """Return lowerings that share the cache, for whole batches in ``count`` microbatches; None: the plan's number."""
        plan = self._plan if count is None else dataclasses.replace(self._plan, n_microbatches=count)
        other = Programs(self._graph, plan, self._lower_at, self.trace_again)
        other._lowered = self._lowered
        return other

    def for_batch(
        self, batch: int, *, in_parts: bool = True, results: Results = "rows", kept: tuple[int, ...] | None = None
    ) -> tuple[int, ShardedModel]:
        """Return the number of microbatches of a batch, and the programs for it; see ``variant_for``."""
        known = (self._graph, self._plan, self.rows, batch)
        count, variant = variant_for(*known, in_parts=in_parts, results=results, kept=kept)
        if (batch, count) not in self._checked:
            check_values_per_channel(self._graph, self._plan, self.rows, batch, count)
            self._checked.add((batch, count))
        if not variant.rows:
            said = f"a batch of {batch} rows does not divide over {self.rows.count} ranks: each computes all of it"
            warnings.warn(said, stacklevel=level_of_caller())
        if variant not in self._lowered:
            self._lowered[variant] = self._lower_at(variant)
        return count, self._lowered[variant]


def variant_for(
    graph: ModelGraph,
    plan: Plan,
    parts_of_rows: RowParts,
    batch: int,
    *,
    in_parts: bool = True,
    results: Results = "rows",
    kept: tuple[int, ...] | None = None,
) -> tuple[int, Variant]:
    """Return the number of microbatches of a batch, and the variant that serves them.

    The number is at most the plan's, and at most the rows of a rank. If the graph is fixed to one size, microbatches are all equal.

    Args:
        batch: rows of the whole batch.
        in_parts: allow returned means over the batch to be computed as sums over microbatches and ranks.
        results: what each rank of a sharded batch returns.
        kept: the indices of the results that are returned, for a step that reads no others; None: all are.
    """
    is_sharded = parts_of_rows.divides(batch)
    n_parts = parts_of_rows.count if is_sharded else 1
    count = min(plan.n_microbatches, batch // n_parts)
    size, whole = None, None
    if not graph.serves(batch):
        count = next(divisor for divisor in range(count, 0, -1) if batch // n_parts % divisor == 0)
        size, whole = batch // count, batch
    if kept is None and count > 1:
        kept = results_in_parts(graph)
    is_split = count > 1 or plan.grid.cutting.size > 1
    has_means = any(output.combine == "mean" for output in graph.outputs)
    return count, Variant(size, whole, in_parts and is_split and has_means, results, is_sharded, parts_of_rows.inputs, kept)


def first_variant(graph: ModelGraph, plan: Plan, inputs: Inputs = "global") -> Variant:
    """Return the variant for the plan's own batch."""
    rows = RowParts(plan.grid, inputs)
    return variant_for(graph, plan, rows, plan.batch_size, results=results_in_training(graph) if graph.training else "rows")[1]
