"""One training step by the plan's schedule: how its loss is computed, its programs, and its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partitioner.model.losses.losses import PreparedLoss
from partitioner.model.served_trace import ServedTrace
from partitioner.reports.explain.step_memory import warn_of_loss
from partitioner.runtime.arguments import BoundInputs
from partitioner.runtime.executor import ProgramSet
from partitioner.specialize.traces import Match
from passes.autograd.staged_model import Differentiation
from passes.emit.place_on_mesh import Gradients
from passes.emit.programs import LossReduction

__all__ = ["PreparedStep", "prepare_step"]


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A training step that can be run.

    Attributes:
        served: the trace for these sizes of the inputs.
        inputs: of the step.
        loss: how the loss is computed.
        differentiation: what gets a gradient.
        programs: of all ranks.
    """

    served: ServedTrace
    inputs: BoundInputs
    loss: PreparedLoss
    differentiation: Differentiation
    programs: ProgramSet

    @property
    def input_names(self) -> list[str]:
        """The inputs whose gradients ``run`` returns, in order."""
        return self.served.calls.input_gradient_names(self.differentiation.inputs)

    def run(self) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Run the step: gradients of parameters are added to ``.grad``. Return the loss, and the gradients of inputs."""
        loss, gradients = self.served.calls.step(self.loss.sharded, self.programs, self.inputs, self.loss.extra)
        return loss, tuple(gradients)


def prepare_step(
    match: Match[ServedTrace],
    inputs: BoundInputs,
    target: Any,
    loss_fn: Callable[..., Tensor] | None,
    loss_reduction: LossReduction,
    gradients: Gradients,
) -> PreparedStep:
    """Decide how a step computes its loss, and lower its programs; reports describe it from now on.

    Raises:
        ConfigError: the loss is no tensor of one number, or contradicts ``loss_reduction``.
    """
    served, planned = match.served, match.planned
    prepared = served.losses.prepare(inputs, target, loss_fn, loss_reduction, served.trace.programs)
    differentiation = prepared.sharded.differentiation(prepared.outputs, inputs.requiring_gradient)
    programs = served.trace.programs.get(prepared.request.train_step(differentiation, prepared.form, gradients))
    is_new, trace = planned.last_step is None or planned.last_step.loss != prepared.form, planned.trace
    if prepared.form.reduction == "batch" and is_new:
        warn_of_loss(trace.plan, trace.assumed.limits)
    of_plan = trace.programs.request(trace.plan.batch_size, **prepared.options)
    planned.last_step = of_plan.train_step(differentiation, prepared.form)
    return PreparedStep(served, inputs, prepared, differentiation, programs)
