"""The partitioned model that reports describe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from passes.analysis.axis_names import axis_names
from passes.autograd.staged_model import SplitModel
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh, ranks_at_places
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.spmd.shard_graph import CutModel
from passes.spmd.shard_stages import StagedCut
from passes.spmd.shards import Block
from passes.verify.value_specs import ValueSpecs, describe_values

__all__ = ["MANY_RANKS", "Blocks", "Explained", "RankClass"]

MANY_RANKS = 16
"""Above so many ranks, reports read one program for each class of equal ranks: programs of all take long."""

Blocks = Mapping[str, Mapping[int, Block]]
"""Placeholder -> rank -> the block that the rank holds."""

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class RankClass:
    """Ranks whose programs are equal but for their peers.

    Attributes:
        program: of one of them. With many ranks, only the first of equal calls of a stage is inlined (``TIMES``).
        ranks: all of them, ascending.
    """

    program: Program
    ranks: tuple[int, ...]

    @staticmethod
    def of_each(programs: Iterable[Program]) -> tuple[RankClass, ...]:
        """Return a class for each program, of its rank alone."""
        return tuple(RankClass(program, (program.rank,)) for program in programs)


@dataclass(frozen=True)
class Explained:
    """A partitioned model, as reports read it.

    Attributes:
        name: the name of the model.
        graph: the graph of the whole model.
        staged: the sharded model, for every pipeline position.
        lowered: the stages of the first pipeline, with their training graphs when the model trains.
        pipelines: the stages of every pipeline, without autograd.
        blocks: the blocks of parameters that ranks hold.
        programs_of_ranks: returns the programs of all ranks.
        classes_of_ranks: returns the programs by classes of equal ranks.
        schedule: the schedule of a training step; None in evaluation.
        limits: the memory limit of each rank in bytes; empty: not known.
        planned_for: the hardware that the plan is for; empty if the programs run on it.
    """

    name: str
    plan: Plan
    graph: ModelGraph
    staged: StagedCut
    lowered: SplitModel
    pipelines: Sequence[SplitModel]
    blocks: Blocks
    programs_of_ranks: Callable[[], Sequence[Program]]
    classes_of_ranks: Callable[[], Sequence[RankClass]]
    schedule: Schedule | None
    limits: Sequence[float] = ()
    planned_for: str = ""

    @functools.cached_property
    def programs(self) -> Sequence[Program]:
        """The programs of all ranks, written when they are first read: those of many ranks take long."""
        return self.programs_of_ranks()

    @functools.cached_property
    def classes(self) -> Sequence[RankClass]:
        """The programs by classes of equal ranks, written when they are first read."""
        return self.classes_of_ranks()

    @property
    def mesh(self) -> Mesh:
        return self.plan.grid

    @property
    def cut(self) -> CutModel:
        """The sharded model; if stages have their own tensor-parallel degrees, that of the largest."""
        return self.staged.widest

    @property
    def is_cut(self) -> bool:
        """Whether the mesh shards any axes."""
        return self.mesh.cutting.size > 1

    def ranks_at(self, places: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks at pipeline positions, over all pipelines, in ascending order."""
        ranks_at = ranks_at_places(self.mesh)
        return tuple(sorted(rank for place in places for rank in ranks_at[place]))

    @functools.cached_property
    def _read(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, read: Callable[[], _Found]) -> _Found:
        """Return what ``read`` finds in the programs; under one key it reads them once."""
        if key not in self._read:
            self._read[key] = read()
        found: _Found = self._read[key]
        return found

    def values(self, program: Program) -> ValueSpecs:
        """Return the values of a program of ``classes``."""
        return self.once(("values", program.rank), lambda: describe_values(program))

    @functools.cached_property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes of ``cut``."""
        return axis_names(self.cut.graph, self.cut.axes)
