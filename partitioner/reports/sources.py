"""The partitioned model that reports describe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from partitioner.specialize.programs import results_in_training
from partitioner.specialize.request import Request
from partitioner.specialize.sharded_model import ShardedModel
from partitioner.specialize.trace import Trace
from passes.analysis.axis_names import axis_names
from passes.autograd.staged_model import SplitModel
from passes.emit.programs import LossForm
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh, ranks_at_places
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.normalize.loss_alone import results_of_step
from passes.spmd.shard_graph import CutModel
from passes.spmd.shard_stages import StagedCut
from passes.spmd.shards import Block
from passes.verify.value_specs import ValueSpecs, describe_values

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
class InspectedPrograms:
    """The programs that reports describe.

    Attributes:
        trace: the model.
        request: of a training step, of a ``call`` (``pm(...)`` and ``backward()``), or of a forward, for the plan's batch.
    """

    trace: Trace
    request: Request

    @classmethod
    def of(cls, trace: Trace, last_step: Request | None) -> InspectedPrograms:
        """Return the programs of the last training step; without one, of a step that differentiates all results, or of a forward."""
        batch, programs, graph = trace.plan.batch_size, trace.programs, trace.graph
        if graph.training and last_step is not None:
            return cls(trace, last_step)
        if graph.training:
            request = programs.request(batch, results=results_in_training(graph), kept=results_of_step(graph))
            everything = programs.sharded(request).everything(frozenset())
            if everything.outputs:
                return cls(trace, request.train_step(everything, LossForm()))
        return cls(trace, programs.request(batch))

    @classmethod
    def of_call(cls, trace: Trace) -> InspectedPrograms:
        """Return the programs of a step by ``pm(...)`` and ``backward()`` of all results; of a forward where there is no gradient."""
        is_gathered = not any(output.combine in ("mean", "sum") for output in trace.graph.outputs)
        request = trace.programs.request(trace.plan.batch_size, results="whole" if is_gathered else "rows")
        everything = trace.programs.sharded(request).everything(frozenset())
        if not (trace.graph.training and everything.outputs):
            return cls.of(trace, None)
        return cls(trace, request.call(everything))

    @property
    def sharded(self) -> ShardedModel:
        """The model, sharded for the plan's batch."""
        return self.trace.programs.sharded(self.request)

    @property
    def stages(self) -> SplitModel:
        """The stages that the programs run."""
        differentiation = self.request.differentiation
        return self.sharded.stages if differentiation is None else self.sharded.training(differentiation)

    @property
    def programs(self) -> tuple[Program, ...]:
        """One program for each rank."""
        return self.trace.programs.get(self.request).programs

    def classes(self) -> tuple[RankClass, ...]:
        """Return the programs by classes of equal ranks; of few ranks, each is a class, and its program the one that runs."""
        size = self.trace.plan.n_ranks
        if size <= MANY_RANKS:
            return RankClass.of_each(self.programs)
        programs, representative_of = self.sharded.representatives(self.request, "first")
        members: dict[int, list[int]] = {}
        for rank in range(size):
            members.setdefault(representative_of[rank], []).append(rank)
        return tuple(RankClass(program, tuple(members[program.rank])) for program in sorted(programs, key=lambda program: program.rank))


@dataclass(frozen=True)
class Explained:
    """A partitioned model, as reports read it. It is lowered when a report first reads its programs.

    Attributes:
        name: the name of the model.
        graph: the graph of the whole model.
        planned: the sharded model by which ranks store parameters.
        blocks: the blocks of parameters that ranks hold.
        inspect: returns the programs that reports describe.
        planned_schedule: the schedule of a training step, if the model trains a parameter; None otherwise.
        limits: the memory limit of each rank in bytes; empty: not known.
        planned_for: the hardware that the plan is for; empty if the programs run on it.
    """

    name: str
    plan: Plan
    graph: ModelGraph
    planned: StagedCut
    blocks: Blocks
    inspect: Callable[[], InspectedPrograms]
    planned_schedule: Schedule | None
    limits: Sequence[float] = ()
    planned_for: str = ""

    @property
    def is_long(self) -> bool:
        """Whether the model has so many operations that tables and texts come from the plan, and only pages from programs."""
        return len(self.graph.graph.nodes) > MANY_NODES

    @functools.cached_property
    def _inspected(self) -> InspectedPrograms:
        return self.inspect()

    @functools.cached_property
    def lowered(self) -> SplitModel:
        """The stages of the first pipeline, with their training graphs when the model trains."""
        return self._inspected.stages

    @functools.cached_property
    def pipelines(self) -> Sequence[SplitModel]:
        """The stages of every pipeline, without autograd."""
        return self._inspected.sharded.pipelines

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of a training step; None in evaluation."""
        return self.planned_schedule if self.is_long or self.lowered.training else None

    @functools.cached_property
    def programs(self) -> Sequence[Program]:
        """The programs of all ranks, written when they are first read: those of many ranks take long."""
        return self._inspected.programs

    @functools.cached_property
    def classes(self) -> Sequence[RankClass]:
        """The programs by classes of equal ranks, written when they are first read."""
        return self._inspected.classes()

    @property
    def rank_classes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each class of equal ones; of a model of many operations, those at each pipeline position."""
        if self.is_long:
            return self.ranks_at_places
        return tuple(of_class.ranks for of_class in self.classes)

    @property
    def mesh(self) -> Mesh:
        return self.plan.grid

    @functools.cached_property
    def cut(self) -> CutModel:
        """The sharded model of the programs; if stages have their own tensor-parallel degrees, that of the largest."""
        return self._inspected.sharded.cut.widest

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
