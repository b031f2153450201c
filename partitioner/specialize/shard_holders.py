"""Cut a model by a plan: one cut for each variant that is lowered, and the blocks of parameters that ranks hold, the same for all."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from partitioner.options.progress import Progress
from partitioner.specialize.request import Variant
from partitioner.tracing.inputs.batch_dims import accidental_batch
from passes.analysis.replicable import read_by_replicable
from passes.autograd.staged_model import cut_stages
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import pipelines
from passes.ir.plan import Plan
from passes.normalize.loss_alone import results_of_step
from passes.pipeline import PHASES, Lowered, Lowerer, Target
from passes.spmd.shard_stages import StagedCut, StoredLayouts
from passes.spmd.shards import Block
from passes.stages.split import read_by_one_stage


class PlanCuts:
    """The cuts of a model by a plan, each made when first asked for.

    Args:
        graph: the model.
        plan: by which it is cut.
        traced_for: traces the model for a number of rows, used if its graph is fixed to one batch size; for None, as it was traced.
        stored: layouts of tensors that ranks store already; None: choose them.
        planned: the cuts of the planned graph, where this graph is for other sizes of the inputs; None: this is the planned one.
        progress: whether a line shows the phase of lowering that runs; None: on a terminal.
    """

    def __init__(
        self,
        graph: ModelGraph,
        plan: Plan,
        traced_for: Callable[[int | None], ModelGraph],
        stored: StoredLayouts | None = None,
        planned: PlanCuts | None = None,
        progress: bool | None = None,
    ) -> None:
        self._graph, self.plan = graph, plan
        self.traced_for = functools.cache(traced_for)
        self._tell = Progress("lowering", len(PHASES), progress).reach
        lowerer = Lowerer(Lowered(plan, graph), self._tell)
        target = Target(kept=results_of_step(graph) if graph.training else None, stored=stored)
        self.plan_cut: StagedCut = self._cut(lowerer, target) if planned is None else planned.plan_cut
        self._given = stored if planned is None else planned.stored
        self._lowerers: dict[int | None, Lowerer] = {None: lowerer, graph.batch_size: lowerer}

    @staticmethod
    def _cut(lowerer: Lowerer, target: Target) -> StagedCut:
        """Run the phases up to sharding and return their cut of the model."""
        cut = lowerer.after("shard", target).cut
        assert cut is not None
        return cut

    def at(self, variant: Variant) -> tuple[Lowerer, Target]:
        """Return the lowerer and the target of one variant of the model."""
        size = variant.batch_size
        if size not in self._lowerers:
            self._lowerers[size] = Lowerer(Lowered(self.plan, self._graph_for(size)), self._tell)
        if size is not None and variant.whole_batch not in (None, size):
            self._check_microbatches(size, variant.whole_batch)
        return self._lowerers[size], Target(variant.kept, variant.in_parts, variant.results, variant.rows, self.stored)

    @functools.cached_property
    def stored(self) -> StoredLayouts:
        """Return the layouts in which ranks store tensors, of all variants."""
        return self.plan_cut.stored if self._given is None else replace(self.plan_cut.stored, holders=self._given.holders)

    def _graph_for(self, rows: int | None) -> ModelGraph:
        return self._graph if rows is None or rows == self._graph.batch_size else self.traced_for(rows)

    def _check_microbatches(self, rows: int, batch: int) -> None:
        """Raise ConfigError if the model, traced for the rows of a microbatch, computes something else than for those of the batch."""
        part, whole = (self._graph_for(size).digest or self.traced_for(size).digest for size in (rows, batch))
        if part is None or part != whole:
            problem = f"the model computes something else for {rows} rows than for {batch}, so that microbatches would be another model"
            raise ConfigError(problem, remedy="pass n_microbatches=1, or let forward compute alike for batches of all sizes")
        mixed = self._graph_for(rows).mixed
        if mixed:
            problem = f"{batch} rows cannot be cut into microbatches: rows of the batch are mixed in {', '.join(mixed)}"
            raise ConfigError(problem, remedy=f"pass n_microbatches=1{accidental_batch(self._graph)}")

    def holdings(self, variant: Variant, devices: Sequence[torch.device]) -> Mapping[str, Mapping[int, Block]]:
        """Return placeholder of a parameter, buffer or constant -> rank -> the block that the rank holds.

        A rank holds what its stages read in this variant, and what any stage may compute for itself (``read_by_replicable``). A buffer that
        no stage reads is held with the other tensors of its module, which other modes may read it with (``num_batches_tracked`` in
        training). Other calls may read a parameter that this one does not: it is held by a stage that reads one of the same module, or
        of the modules around, the nearest before it or after it.

        Args:
            devices: for each rank, where it runs.
        """
        graph, plan, plan_cut = self._graph, self.plan, self.plan_cut
        positions = {rank: position for ranks in pipelines(plan.grid) for position, rank in enumerate(ranks)}
        read_by_stage = self._read_by_stage(variant, devices)
        may_replicate = plan_cut.widest.cut.rows and len(plan.stages) > 1
        read_by_any = read_by_replicable(plan_cut.widest.graph) if may_replicate else frozenset[str]()
        read_on = [*zip(read_by_stage, plan.stage_ranks, strict=True)]
        placeholders = (*graph.parameters, *graph.buffers, *graph.constants)
        readers = {
            name: [rank for rank, place in sorted(positions.items()) if any(name in names and place in ranks for names, ranks in read_on)]
            for name in placeholders
        }
        readers_of_module: defaultdict[str, set[int]] = defaultdict(set)
        for name, path in graph.weights.items():
            readers_of_module[path.rpartition(".")[0]].update(readers[name])
        beside = {name: sorted(readers_of_module[path.rpartition(".")[0]]) for name, path in graph.buffers.items()}
        readers.update({name: sorted(positions) for name in read_by_any if name in readers})
        near = self._ranks_near(read_by_stage, positions)
        first = [rank for rank, position in positions.items() if position in plan.stage_ranks[0]]  # no stage reads any parameter
        holders = {name: readers[name] or beside.get(name) or near.get(name, first) for name in placeholders}
        blocks = {rank: plan_cut.blocks(position, rank) for rank, position in positions.items()}
        return {name: {rank: blocks[rank][name] for rank in ranks} for name, ranks in holders.items()}

    def _ranks_near(self, read_by_stage: Sequence[frozenset[str]], positions: Mapping[int, int]) -> dict[str, list[int]]:
        """Return parameter or buffer that no stage reads -> the ranks of the stage that reads the nearest parameter.

        Parameters are in the order of modules, so that those of the modules around one are beside it.
        """
        stage_of: dict[str, int] = {}
        for stage, names in enumerate(read_by_stage):
            for name in names:
                stage_of.setdefault(name, stage)
        ranks = [[rank for rank, position in positions.items() if position in stage] for stage in self.plan.stage_ranks]
        parameters, buffers = list(self._graph.parameters.items()), self._graph.buffers.items()
        read = [index for index, (name, _) in enumerate(parameters) if name in stage_of]
        near: dict[str, int] = {}
        for index, (name, path) in enumerate(parameters):
            after = bisect.bisect_left(read, index)
            beside = [parameters[each] for each in read[max(after - 1, 0) : after + 1]]
            if name not in stage_of and beside:
                near[name] = stage_of[max(beside, key=lambda other: _common_modules(path, other[1]))[0]]
        for name, path in buffers:
            if name not in stage_of and parameters:
                nearest = max(parameters, key=lambda other: _common_modules(path, other[1]))[0]
                near[name] = near.get(nearest, stage_of.get(nearest, 0))
        return {name: ranks[stage] for name, stage in near.items()}

    def _read_by_stage(self, variant: Variant, devices: Sequence[torch.device]) -> list[frozenset[str]]:
        """Return for each stage the placeholders that it reads. One stage reads what the model does: no graph of a rank is written."""
        plan, (lowerer, target) = self.plan, self.at(variant)
        if len(plan.stages) == 1:
            return [read_by_one_stage(lowerer.after("boundary_layouts", target).graph)]
        stage_devices = [devices[pipelines(plan.grid)[0][stage.ranks[0]]] for stage in plan.stages]
        return [frozenset(stage.bound) for stage in cut_stages(self._cut(lowerer, target).parts[0], plan, stage_devices).stages]


def _common_modules(path: str, other: str) -> int:
    """Return how many modules contain both of two parameters."""
    pairs = zip(path.split(".")[:-1], other.split(".")[:-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
