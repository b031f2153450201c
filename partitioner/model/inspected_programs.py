"""Which of a model's programs are looked at: printed, explained, simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from partitioner.lowering.lowering import Lowering
from partitioner.lowering.variants import results_in_training
from passes.autograd.staged_model import Differentiation, LoweredStages
from passes.emit.programs import LossForm
from passes.ir.graph import ModelGraph, Results
from passes.ir.program import Program

__all__ = ["InspectedPrograms", "LastStep", "inspected_programs"]

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


def inspected_programs(
    graph: ModelGraph, batch: int, lowering_for: Callable[..., tuple[int, Lowering]], last_step: LastStep | None
) -> InspectedPrograms:
    """The last training step, before any the one that differentiates every result; a forward for a model that does not train.

    Args:
        graph: the model.
        batch: rows.
        lowering_for: ``Session.lowering_for``.
        last_step: if there was one.
    """
    results = results_in_training(graph)
    if not graph.training or not lowering_for(batch, results=results)[1].everything(frozenset()).outputs:
        count, lowering = lowering_for(batch)
        return InspectedPrograms(lowering, count, None, LossForm())
    if last_step is None:
        count, lowering = lowering_for(batch, results=results)
        return InspectedPrograms(lowering, count, lowering.everything(frozenset()), LossForm())
    in_parts, results, differentiation, form = last_step
    count, lowering = lowering_for(batch, in_parts=in_parts, results=results)
    return InspectedPrograms(lowering, count, differentiation, form)
