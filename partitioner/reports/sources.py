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

__all__ = ["MANY_NODES", "MANY_RANKS", "Blocks", "Explained", "LoweredModel", "RankClass"]

MANY_RANKS = 16
"""Above so many ranks, reports read one program for each class of equal ranks: programs of all take long."""

MANY_NODES = 1000
"""Operations of a model above which tables and texts lower no program: that takes seconds for each thousand."""

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
class LoweredModel:
    """A partitioned model as its programs are lowered.

    Attributes:
        staged: the sharded model, for every pipeline position.
        stages: the stages of the first pipeline, with their training graphs when the model trains.
        pipelines: the stages of every pipeline, without autograd.
    """

    staged: StagedCut
    stages: SplitModel
    pipelines: Sequence[SplitModel]


@dataclass(frozen=True)
class Explained:
    """A partitioned model, as reports read it. It is lowered when a report first reads its programs.

    Attributes:
        name: the name of the model.
        graph: the graph of the whole model.
        planned: the sharded model by which ranks store parameters.
        blocks: the blocks of parameters that ranks hold.
        lower: lowers the model.
        programs_of_ranks: returns the programs of all ranks.
        classes_of_ranks: returns the programs by classes of equal ranks.
        planned_schedule: the schedule of a training step, if the model trains a parameter; None otherwise.
        limits: the memory limit of each rank in bytes; empty: not known.
        planned_for: the hardware that the plan is for; empty if the programs run on it.
    """

    name: str
    plan: Plan
    graph: ModelGraph
    planned: StagedCut
    blocks: Blocks
    lower: Callable[[], LoweredModel]
    programs_of_ranks: Callable[[], Sequence[Program]]
    classes_of_ranks: Callable[[], Sequence[RankClass]]
    planned_schedule: Schedule | None
    limits: Sequence[float] = ()
    planned_for: str = ""

    @property
    def is_long(self) -> bool:
        """Whether the model has so many operations that tables and texts come from the plan, and only pages from programs."""
        return len(self.graph.graph.nodes) > MANY_NODES

    @functools.cached_property
    def _lowered_model(self) -> LoweredModel:
        return self.lower()

    @property
    def lowered(self) -> SplitModel:
        """The stages of the first pipeline, with their training graphs when the model trains."""
        return self._lowered_model.stages

    @property
    def pipelines(self) -> Sequence[SplitModel]:
        """The stages of every pipeline, without autograd."""
        return self._lowered_model.pipelines

    @property
    def staged(self) -> StagedCut:
        """The sharded model that the programs are lowered from, for every pipeline position."""
        return self._lowered_model.staged

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of a training step; None in evaluation."""
        return self.planned_schedule if self.is_long or self.lowered.training else None

    @functools.cached_property
    def programs(self) -> Sequence[Program]:
        """The programs of all ranks, written when they are first read: those of many ranks take long."""
        return self.programs_of_ranks()

    @functools.cached_property
    def classes(self) -> Sequence[RankClass]:
        """The programs by classes of equal ranks, written when they are first read."""
        return self.classes_of_ranks()

    @property
    def rank_classes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each class of equal ones; of a model of many operations, those at each pipeline position."""
        if self.is_long:
            return self.ranks_at_places
        return tuple(of_class.ranks for of_class in self.classes)

    @property
    def mesh(self) -> Mesh:
        return self.plan.grid

    @property
    def cut(self) -> CutModel:
        """The sharded model of the programs; if stages have their own tensor-parallel degrees, that of the largest."""
        return self.staged.widest

    @property
    def is_cut(self) -> bool:
        """Whether the mesh shards any axes."""
        return self.mesh.cutting.size > 1

    def ranks_at(self, places: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks at pipeline positions, over all pipelines, in ascending order."""
        return tuple(sorted(rank for place in places for rank in self.ranks_at_places[place]))

    @functools.cached_property
    def ranks_at_places(self) -> tuple[tuple[int, ...], ...]:
        """The ranks at each pipeline position, over all pipelines."""
        return ranks_at_places(self.mesh)

    @functools.cached_property
    def _read(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, read: Callable[[], _Found]) -> _Found:
        """Return the result of ``read`` on the plan or the programs; it is called once for a key."""
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

    @functools.cached_property
    def planned_axis_names(self) -> tuple[str, ...]:
        """The names of the axes of ``planned``."""
        return axis_names(self.planned.widest.graph, self.planned.widest.axes)
