"""What reports are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.blocks import Block
from passes.cut_axes import CutModel
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh, pipelines
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.lower import LoweredStages

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
        cut: its axes, and how they are cut.
        lowered: the stages of the first pipeline, with their training graphs when the model trains.
        pipelines: the stages of every pipeline, without autograd.
        blocks: what ranks hold of each parameter.
        programs: of all ranks.
        schedule: of a training step; None in evaluation.
        limits: for each rank the bytes that it may hold; empty: not known.
    """

    name: str
    plan: Plan
    graph: ModelGraph
    cut: CutModel
    lowered: LoweredStages
    pipelines: Sequence[LoweredStages]
    blocks: Blocks
    programs: Sequence[Program]
    schedule: Schedule | None
    limits: Sequence[float] = ()

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.plan.mesh)

    @property
    def is_cut(self) -> bool:
        """Whether the mesh cuts axes."""
        return self.mesh.cutting.size > 1

    def ranks_at(self, place: int) -> tuple[int, ...]:
        """The ranks that stand at a place along the pipeline."""
        return tuple(sorted(ranks[place] for ranks in pipelines(self.mesh)))
