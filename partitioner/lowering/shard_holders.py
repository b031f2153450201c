"""How a plan cuts a model: one cut for each way in which the model is lowered, and the blocks that ranks hold, the same for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from partitioner.lowering.variants import Variant
from passes.analysis.batch_sizes import pair_nodes
from passes.analysis.replicable import read_by_replicable
from passes.autograd.staged_model import cut_stages
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import pipelines
from passes.ir.plan import Plan
from passes.pipeline import Lowered, Lowerer, Target
from passes.spmd.shard_stages import StagedCut
from passes.spmd.shards import Block

__all__ = ["PlanCuts"]


class PlanCuts:
    """The cuts of a model by a plan, each made when first asked for.

    Args:
        graph: the model.
        plan: how it is cut.
        traced_for: traces the model for another size of the batch, where its graph serves one alone.
    """

    def __init__(self, graph: ModelGraph, plan: Plan, traced_for: Callable[[int], ModelGraph]) -> None:
        self._graph, self._plan, self._traced_for = graph, plan, traced_for
        self._decided = self._cut(Lowerer(Lowered(plan, graph)), Target())
        self._found: dict[int | None, Lowerer] = {}

    @staticmethod
    def _cut(lowerer: Lowerer, target: Target) -> StagedCut:
        cut = lowerer.after("shard", target).cut
        assert cut is not None
        return cut

    def at(self, variant: Variant) -> tuple[Lowerer, Target]:
        """What runs the phases for one way in which the model is lowered, and what is asked of them."""
        size = None if variant.batch_size in (None, self._graph.batch_size) else variant.batch_size
        if size not in self._found:
            graph = self._graph if size is None else self._traced_again(size)
            self._found[size] = Lowerer(Lowered(self._plan, graph, held=self._decided))
        return self._found[size], Target(variant.in_parts, variant.results, variant.rows)

    def _traced_again(self, size: int) -> ModelGraph:
        """The model for another size; microbatches have to be computed as the batch is, or together they are another model."""
        graph = self._traced_for(size)
        if self._plan.n_microbatches > 1 and (graph.mixed or pair_nodes(self._graph.graph, graph.graph) is None):
            raise ConfigError(
                f"the model computes something else for {size} rows than for {self._graph.batch_size}, so that microbatches would be "
                "another model",
                remedy="pass n_microbatches=1, or let forward compute alike for batches of all sizes",
            )
        return graph

    def holdings(self, variant: Variant, devices: Sequence[torch.device]) -> Mapping[str, Mapping[int, Block]]:
        """Placeholder -> rank -> the block that it holds.

        A rank holds what its stages read of the part that this variant is cut into, and what any stage may need. What no stage reads stays
        with rank 0.

        Args:
            devices: for each rank, where it runs.
        """
        graph, plan, decided = self._graph, self._plan, self._decided
        places = {rank: place for ranks in pipelines(plan.grid) for place, rank in enumerate(ranks)}
        of_stages = [devices[pipelines(plan.grid)[0][stage.ranks[0]]] for stage in plan.stages]
        stages = cut_stages(self._cut(*self.at(variant)).parts[0], plan, of_stages).stages
        is_shared = decided.widest.cut.rows and len(plan.stages) > 1
        shared = read_by_replicable(decided.widest.graph) if is_shared else frozenset[str]()
        needed = {
            rank: shared.union(*(stage.bound for stage in stages if place in plan.stage_ranks[stage.index]))
            for rank, place in sorted(places.items())
        }
        held = (*graph.parameters, *graph.buffers, *graph.constants)
        holders = {name: [rank for rank, names in needed.items() if name in names] or [0] for name in held}
        blocks = {rank: decided.blocks(place, rank) for rank, place in places.items()}
        return {name: {rank: blocks[rank][name] for rank in ranks} for name, ranks in holders.items()}
