"""One training step by the plan's schedule: how its loss is computed, its programs, and its run.

A step of a kind that there was before, by the loss function and the kinds of targets, is found; else its loss is proved and its programs
are made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from partitioner.model.losses.losses import PreparedLoss, check_loss
from partitioner.model.losses.reachable_state import loss_key
from partitioner.model.served_trace import ServedTrace
from partitioner.reports.explain.step_memory import warn_of_loss
from partitioner.runtime.arguments import BoundInputs
from partitioner.runtime.executor import ProgramSet
from partitioner.specialize.request import Request
from partitioner.specialize.signature import kind_of
from partitioner.specialize.traces import Match
from passes.emit.place_on_mesh import Gradients
from passes.emit.programs import LossReduction
from passes.ir.torch_private import tree_flatten

_STEPS_KEPT = 64
"""Kinds of steps of one trace that are kept."""


@dataclass(frozen=True, eq=False)
class StepArguments:
    """The arguments of a training step besides inputs.

    Attributes:
        target: second argument of ``loss_fn``.
        loss_fn: the loss; None: the model returns it.
        reduction: of the loss over the rows of the batch.
        gradients: whether gradients of parameters are summed over ranks.
    """

    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None
    reduction: LossReduction = "mean"
    gradients: Gradients = "sum"


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A training step that can be run.

    Attributes:
        served: the trace for these sizes of the inputs.
        inputs: of the step.
        loss: how the loss is computed.
        of_plan: the same step of the plan's batch, which reports describe.
        programs: of all ranks.
        input_names: the inputs whose gradients ``run`` returns, in order.
        extra: rank of this process -> arguments of its program besides inputs of the model.
    """

    served: ServedTrace
    inputs: BoundInputs
    loss: PreparedLoss
    of_plan: Request
    programs: ProgramSet
    input_names: list[str]
    extra: Mapping[int, Mapping[str, Any]]

    def run(self) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Run the step: gradients of parameters are added to ``.grad``. Return the loss, and the gradients of inputs."""
        loss, gradients = self.served.calls.step(self.loss.sharded, self.programs, self.inputs, self.extra)
        return loss, tuple(gradients)


def prepare_step(match: Match[ServedTrace], inputs: BoundInputs, given: StepArguments) -> PreparedStep:
    """Find a step of this kind, else decide how it computes its loss, and make its programs; reports describe it from now on.

    Raises:
        ConfigError: the loss is no tensor of one number, or contradicts ``given.reduction``.
    """
    served, key = match.served, _key(match, inputs, given)
    known = served.steps.get(key)
    step = _make(match, inputs, given) if known is None else _again(match, inputs, given, known)
    if known is None and key is not None and step.loss.questions is not None:
        if len(served.steps) >= _STEPS_KEPT:
            served.steps.clear()
        empty = replace(inputs, tensors={}, written={})  # else tensors would be kept
        served.steps[key] = replace(step, inputs=empty, loss=replace(step.loss, extra={}), extra={})
    match.planned.last_step = step.of_plan
    return step


def _key(match: Match[ServedTrace], inputs: BoundInputs, given: StepArguments) -> Hashable:
    """Return a key that is equal for steps that are prepared alike but for values; None if the target has values that are not compared."""
    target = given.target
    leaves, tree = ((target,), None) if target is None or isinstance(target, Tensor) else tree_flatten(target)
    kinds = tuple(map(kind_of, leaves))
    if None in kinds or type(given.reduction) is not str:
        return None
    trained = match.served.trace.state.gradients.trained
    loss = loss_key(given.loss_fn), given.reduction, given.gradients
    return inputs.batch, inputs.requiring_gradient, trained, tree, kinds, *loss


def _again(match: Match[ServedTrace], inputs: BoundInputs, given: StepArguments, known: PreparedStep) -> PreparedStep:
    """Return a step that is prepared like an earlier one."""
    served, loss = match.served, known.loss
    runtime = served.trace.runtime
    for question, answer in (loss.questions or ()) if len(runtime.local_ranks) < runtime.n_ranks else ():
        runtime.agree(question, answer, in_step=True)
    rows = None if loss.takes_whole_target or loss.sharded.rows.count == 1 else loss.sharded.rows
    extra: dict[int, Mapping[str, Any]] = {}
    for rank in runtime.local_ranks:
        target = given.target if rows is None else rows.target_of_rank(given.target, inputs.batch, rank)
        extra[rank] = {"target": target, "loss_fn": given.loss_fn}
    if loss.combination == "counted":
        loss = served.losses.again(loss, inputs, extra, given.target, given.reduction, served.trace.programs)
        if loss.combination != "counted":
            return _made(match, inputs, given, loss)
        extra = dict(loss.extra)
    return PreparedStep(served, inputs, known.loss, known.of_plan, known.programs, known.input_names, extra)


def _make(match: Match[ServedTrace], inputs: BoundInputs, given: StepArguments) -> PreparedStep:
    check_loss(given.loss_fn, given.reduction)
    loss = match.served.losses.prepare(inputs, given.target, given.loss_fn, given.reduction, match.served.trace.programs)
    return _made(match, inputs, given, loss)


def _made(match: Match[ServedTrace], inputs: BoundInputs, given: StepArguments, loss: PreparedLoss) -> PreparedStep:
    """Return a step with the programs for its loss."""
    served, planned = match.served, match.planned
    differentiation = loss.sharded.differentiation(loss.outputs, inputs.requiring_gradient)
    programs = served.trace.programs.get(loss.request.train_step(differentiation, loss.form, given.gradients))
    is_new, trace = planned.last_step is None or planned.last_step.loss != loss.form, planned.trace
    if loss.form.reduction == "batch" and is_new:
        warn_of_loss(trace.plan, trace.assumed.limits)
    of_plan = trace.programs.request(trace.plan.batch_size, **loss.options).train_step(differentiation, loss.form)
    return PreparedStep(served, inputs, loss, of_plan, programs, served.calls.input_gradient_names(differentiation.inputs), loss.extra)
