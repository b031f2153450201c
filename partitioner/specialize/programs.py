"""The table of programs of one trace: request -> the programs of all ranks, lowered when they are first asked for.

pm(x), 8 rows       request(8)  ──>  Request("forward", Variant, 2 microbatches)  ──>  find, else make
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

from partitioner.options.batch_rows import Inputs, RowParts
from partitioner.options.batch_statistics import check_values_per_channel
from partitioner.runtime.base import Runtime
from partitioner.runtime.executor import Executable, ProgramSet
from partitioner.runtime.state.parameters import BoundTensors
from partitioner.specialize.request import Request, Variant
from partitioner.specialize.shard_holders import PlanCuts
from partitioner.specialize.sharded_model import ShardedModel
from passes.ir.errors import level_of_caller
from passes.ir.graph import ModelGraph, Results
from passes.ir.plan import Plan
from passes.normalize.loss_alone import results_in_parts, results_of_step


def results_in_training(graph: ModelGraph) -> Results:
    """Return the form of results in training: ``"rows"`` if an output is a mean or sum, else ``"whole"`` if one is mixed, else ``"loss"``.

    Of a model that returns its loss, this output alone counts.
    """
    kept = results_of_step(graph)
    kinds = {output.combine for index, output in enumerate(graph.outputs) if output.destination is None and (kept is None or index in kept)}
    if kinds & {"mean", "sum"}:
        return "rows"
    return "whole" if "mixed" in kinds else "loss"


@dataclasses.dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of this process that programs are bound to.

    Attributes:
        of_rank: returns the tensors of a rank of this process.
        trainable: returns the placeholders of the parameters that get gradients, of all ranks: more of them when some are unfrozen.
    """

    of_rank: Callable[[int], BoundTensors]
    trainable: Callable[[], frozenset[str]] = frozenset[str]


class Programs:
    """Finds the programs for a request, and makes those of the first request of its kind.

    Args:
        graph: the model.
        plan: by which it is lowered.
        cuts: of the model by the plan.
        runtime: its devices, and the ranks of this process: only their programs are bound to tensors.
        tensors: of this process.
        inputs: what each process passes.
    """

    def __init__(
        self, graph: ModelGraph, plan: Plan, cuts: PlanCuts, runtime: Runtime, tensors: Tensors, inputs: Inputs = "global"
    ) -> None:
        self._graph, self._plan, self._cuts, self._runtime, self._tensors = graph, plan, cuts, runtime, tensors
        self.rows = RowParts(plan.grid, inputs)
        self._sharded: dict[Variant, ShardedModel] = {}
        self._made: dict[Request, ProgramSet] = {}
        self._checked: set[tuple[int, int]] = set()  # (batch size, microbatches)

    def with_microbatches(self, count: int | None) -> Programs:
        """Return a table that shares the programs, for whole batches in ``count`` microbatches; None: the plan's number."""
        plan = self._plan if count is None else dataclasses.replace(self._plan, n_microbatches=count)
        other = Programs(self._graph, plan, self._cuts, self._runtime, self._tensors)
        other._sharded, other._made = self._sharded, self._made
        return other

    def request(self, batch: int, *, in_parts: bool = True, results: Results = "rows", kept: tuple[int, ...] | None = None) -> Request:
        """Return the request of a forward of a batch, from which those of other programs are derived; see ``variant_for``."""
        count, variant = variant_for(self._graph, self._plan, self.rows, batch, in_parts=in_parts, results=results, kept=kept)
        if (batch, count) not in self._checked:
            check_values_per_channel(self._graph, self._plan, self.rows, batch, count)
            self._checked.add((batch, count))
        if not variant.rows:
            said = f"a batch of {batch} rows does not divide over {self.rows.count} ranks: each computes all of it"
            warnings.warn(said, stacklevel=level_of_caller())
        return Request("forward", variant, count)

    def sharded(self, request: Request) -> ShardedModel:
        """Return the model, sharded for the batch of a request."""
        if request.variant not in self._sharded:
            lowerer, target = self._cuts.at(request.variant)
            model = ShardedModel(lowerer, target, self._cuts.plan, self._runtime.devices, self._tensors.trainable, request.variant)
            self._sharded[request.variant] = model
        return self._sharded[request.variant]

    def get(self, request: Request) -> ProgramSet:
        """Return the programs of a request."""
        return self._made[request] if request in self._made else self.make(request)

    def make(self, request: Request) -> ProgramSet:
        """Lower and verify the programs of a request, and bind those of this process to its tensors."""
        sharded, local_ranks = self.sharded(request), self._runtime.local_ranks
        programs = sharded.lowerer.programs(sharded.target(request))
        for rank in local_ranks:
            programs[rank].bind(*self._tensors.of_rank(rank))
        self._made[request] = ProgramSet(programs, {rank: Executable(programs[rank]) for rank in local_ranks})
        return self._made[request]


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
    """Return the variant for the plan's own batch, or for that of a graph that is fixed to another one."""
    rows, batch = RowParts(plan.grid, inputs), plan.batch_size
    if not graph.serves(batch) and graph.batch_size != batch:
        batch = rows.batch_size(graph.batch_size)
    return variant_for(graph, plan, rows, batch, results=results_in_training(graph) if graph.training else "rows")[1]
