"""The programs of a model that reports describe: printed, explained, simulated."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.reports.sources import MANY_RANKS, RankClass
from partitioner.specialize.programs import Programs
from partitioner.specialize.request import Request
from partitioner.specialize.sharded_model import ShardedModel
from passes.autograd.staged_model import SplitModel
from passes.ir.program import Program

__all__ = ["InspectedPrograms"]


@dataclass(frozen=True)
class InspectedPrograms:
    """The programs that reports describe.

    Attributes:
        table: finds or makes them.
        request: of a training step, of a ``call`` (``pm(...)`` and ``backward()``), or of a forward, for the plan's batch.
    """

    table: Programs
    request: Request

    @property
    def sharded(self) -> ShardedModel:
        """The model, sharded for the plan's batch."""
        return self.table.sharded(self.request)

    @property
    def stages(self) -> SplitModel:
        """The stages that the programs run."""
        differentiation = self.request.differentiation
        return self.sharded.stages if differentiation is None else self.sharded.training(differentiation)

    @property
    def programs(self) -> tuple[Program, ...]:
        """One program for each rank."""
        return self.table.get(self.request).programs

    def classes(self) -> tuple[RankClass, ...]:
        """Return the programs by classes of equal ranks; of few ranks, each is a class, and its program the one that runs."""
        size = self.sharded.plan.n_ranks
        if size <= MANY_RANKS:
            return RankClass.of_each(self.programs)
        programs, representative_of = self.sharded.representatives(self.request, "first")
        members: dict[int, list[int]] = {}
        for rank in range(size):
            members.setdefault(representative_of[rank], []).append(rank)
        return tuple(RankClass(program, tuple(members[program.rank])) for program in sorted(programs, key=lambda program: program.rank))
