"""What reports are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.autograd.staged_model import LoweredStages
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh, ranks_at_places
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.spmd.shard_graph import CutModel
from passes.spmd.shard_stages import StagedCut
from passes.spmd.shards import Block

__all__ = ["Blocks", "Explained"]

Blocks = Mapping[str, Mapping[int, Block]]
"""Placeholder -> rank -> what the rank holds of it."""


@dataclass(frozen=True)
class Explained:
    """A partitioned model, as reports read it.

    Attributes:
        name: of the model.
        plan: where everything runs.
        graph: the whole model.
        staged: how its axes are cut.
        lowered: the stages of the first pipeline, with their training graphs when the model trains.
        pipelines: the stages of every pipeline, without autograd.
        blocks: what ranks hold of each parameter.
        programs: of all ranks.
        schedule: of a training step; None in evaluation.
        limits: for each rank the bytes that it may hold; empty: not known.
        planned_for: the hardware that the plan is for; empty where it is the hardware that runs it.
    """

    name: str
    plan: Plan
    graph: ModelGraph
    staged: StagedCut
    lowered: LoweredStages
    pipelines: Sequence[LoweredStages]
    blocks: Blocks
    programs: Sequence[Program]
    schedule: Schedule | None
    limits: Sequence[float] = ()
    planned_for: str = ""

    @property
    def mesh(self) -> Mesh:
        return self.plan.grid

    @property
    def cut(self) -> CutModel:
        """Its axes, and how they are cut; where stages have degrees of their own, for the widest."""
        return self.staged.widest

    @property
    def is_cut(self) -> bool:
        """Whether the mesh cuts axes."""
        return self.mesh.cutting.size > 1

    def ranks_at(self, place: int) -> tuple[int, ...]:
        """The ranks that stand at a place along the pipeline."""
        return ranks_at_places(self.mesh)[place]
