"""The programs of a model that reports describe: printed, explained, simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from partitioner.reports.sources import MANY_RANKS, RankClass
from partitioner.specialize.sharded_model import ShardedModel
from passes.autograd.staged_model import Differentiation, SplitModel
from passes.emit.programs import LossForm
from passes.ir.graph import Results
from passes.ir.program import Program

__all__ = ["InspectedPrograms", "LastStep"]

LastStep: TypeAlias = tuple[bool, Results, tuple[int, ...] | None, Differentiation, LossForm]
"""Of the last training step: whether means were sums of parts, the results that ranks returned, the output that is the loss where no other
was read, the differentiation and the loss."""


@dataclass(frozen=True)
class InspectedPrograms:
    """The programs that reports describe.

    Attributes:
        lowering: the model, lowered for the plan's batch.
        n_microbatches: of that batch.
        differentiation: of a training step; None: the programs are a forward.
        loss: of the training step; None: it is one by ``pm(...)`` and ``backward()``, whose loss the caller computes.
    """

    lowering: ShardedModel
    n_microbatches: int
    differentiation: Differentiation | None
    loss: LossForm | None

    @property
    def stages(self) -> SplitModel:
        """The stages that the programs run."""
        return self.lowering.stages if self.differentiation is None else self.lowering.training(self.differentiation)

    @property
    def programs(self) -> tuple[Program, ...]:
        """One program for each rank."""
        return self.read_programs()

    def read_programs(self) -> tuple[Program, ...]:
        """Return one program for each rank."""
        if self.differentiation is None:
            return self.lowering.forward(self.n_microbatches).programs
        if self.loss is None:
            return self.lowering.call(self.differentiation, self.n_microbatches).programs
        return self.lowering.train_step(self.differentiation, self.n_microbatches, self.loss).programs

    def classes(self) -> tuple[RankClass, ...]:
        """Return the programs by classes of equal ranks; of few ranks, each is a class, and its program the one that runs."""
        size = self.lowering.plan.n_ranks
        if size <= MANY_RANKS:
            return RankClass.of_each(self.programs)
        programs, representative_of = self.lowering.representatives(self.differentiation, self.n_microbatches, self.loss, "first")
        members: dict[int, list[int]] = {}
        for rank in range(size):
            members.setdefault(representative_of[rank], []).append(rank)
        return tuple(RankClass(program, tuple(members[program.rank])) for program in sorted(programs, key=lambda program: program.rank))
