"""Which of a model's programs are looked at: printed, explained, simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from partitioner.lowering.lowering import Lowering
from passes.autograd.staged_model import Differentiation, LoweredStages
from passes.emit.programs import LossForm
from passes.ir.graph import Results
from passes.ir.program import Program

__all__ = ["InspectedPrograms", "LastStep"]

LastStep: TypeAlias = tuple[bool, Results, Differentiation, LossForm]
"""What the last training step was: whether means were sums of parts, what ranks returned, what was differentiated, the loss."""


@dataclass(frozen=True)
class InspectedPrograms:
    """Which programs are looked at.

    Attributes:
        lowering: the model, lowered for the plan's batch.
        n_microbatches: of that batch.
        differentiation: what a training step differentiates; None: a forward.
        loss: of the training step.
    """

    lowering: Lowering
    n_microbatches: int
    differentiation: Differentiation | None
    loss: LossForm

    @property
    def stages(self) -> LoweredStages:
        """The stages behind the programs."""
        return self.lowering.stages if self.differentiation is None else self.lowering.training(self.differentiation)

    @property
    def programs(self) -> tuple[Program, ...]:
        """One a rank."""
        if self.differentiation is None:
            return self.lowering.forward(self.n_microbatches).programs
        return self.lowering.train_step(self.differentiation, self.n_microbatches, self.loss).programs
