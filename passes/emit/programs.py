"""Write the programs of all ranks: a training step by a schedule; a forward; the backward of a forward; both as one program.

A training step of rank 1 of 2, 1F1B with two microbatches (sizes left out):

    receive_h_mb0 = receive(...)                            posted early
    receive_h_mb1 = receive(...)
    h_mb0 = wait(receive_h_mb0)
    stage1_forward_mb0 = self.stage1_forward(h_mb0)         1F0
    loss_call_mb0 = self.loss([out_mb0], target_mb0, ...)
    stage1_backward_mb0 = self.stage1_backward(...)         1B0
    send_h_gradient_mb0 = send(...)
    ...                                                     1F1, 1B1
    stage1_store_gradients = self.stage1_store_gradients(accumulate_gradients_stage1_mb1)
    return (loss, ())
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from passes.autograd.staged_model import SplitModel, reached_gradients
from passes.emit.communication_plan import (
    Item,
    Message,
    Script,
    differentiated_outputs,
    number_messages,
    step_scripts,
    sweep_scripts,
)
from passes.emit.stage_emitter import StageEmitter
from passes.ir.comm.microbatch import concatenate, microbatch_weights, split_batch, split_target, total, weighted_total
from passes.ir.comm.primitives import all_reduce, wait
from passes.ir.program import LossCall, Program, ProgramKind
from passes.ir.schedule import Action, ActionKind, Schedule

LossReduction = Literal["mean", "sum", "batch"]
"""Reduction of a loss over the rows of a batch: mean, sum, or a function of all rows at once."""

LOOKAHEAD = 1
"""How many actions ahead receives are posted: enough for a transfer to overlap the action before."""


@dataclass(frozen=True)
class LossForm:
    """Facts of the loss for programs.

    Attributes:
        reduction: whether it is a mean or a sum over the batch, or needs all rows of the batch at once.
        dtype: of its value.
        is_weighted: whether programs are given what each microbatch counts; else it follows from its rows.
        draws: whether it draws random numbers.
        changes: whether it changes results of the model in place.
    """

    reduction: LossReduction = "mean"
    dtype: torch.dtype = torch.float32
    is_weighted: bool = False
    draws: bool = False
    changes: bool = False


def emit_train_step(lowered: SplitModel, schedule: Schedule, loss: LossForm, devices: Sequence[torch.device]) -> tuple[Program, ...]:
    """Emit one training step by a schedule; a loss of all rows needs a schedule with all forwards first.

    Programs take ``batch``, model inputs, and on collectors ``target`` and ``loss_fn``; they return
    ``(loss, (gradients of inputs...))``; where forward writes inputs, ``(loss, (gradients...), (new values...))``.
    """
    scripts = step_scripts(lowered, schedule, of_all_rows=loss.reduction == "batch")
    tags = number_messages(scripts)
    programs = []
    for rank, script in enumerate(scripts):
        extra = ("target", "loss_fn", *(["loss_weights"] if loss.is_weighted else [])) if rank in lowered.collectors else ()
        emitter = StageEmitter(lowered, rank, schedule.n_microbatches, tags, extra, loss.dtype)
        emitter.prepare(devices[rank])
        emitter.gather_parameters((item.action for item in script), training=True)
        losses: list[fx.Node] = []
        own = script[:-1] if lowered.writes else script
        for position, item in enumerate(own):
            emitter.section = item.action or "gradients of parameters"
            emitter.post(script[position : position + 1 + LOOKAHEAD])
            if item.action is not None:
                _run(emitter, item.action, training=True)
                is_last_forward = item.action.kind is ActionKind.FORWARD and item.action.stage == len(lowered.stages) - 1
                if loss.reduction != "batch" and is_last_forward:
                    _loss_of_microbatch(emitter, item.action.microbatch, loss, losses)
            if item.takes_loss:
                _loss_of_all_rows(emitter, loss, [_over_batch(emitter, name) for name in lowered.returned])
            _send_all(emitter, item)
            if item.action is not None:
                emitter.scatter_gradients(item.action)
        emitter.store_gradients()
        emitter.section = "results"
        written = (_outputs(emitter, script[-1], lowered.writes),) if lowered.writes else ()
        result = (_loss_of_batch(emitter, script, loss), emitter.input_gradients(), *written)
        programs.append(_program("train_step", lowered, rank, emitter.finish(result, f"Rank{rank}TrainStep")))
    return tuple(programs)


def emit_forward(lowered: SplitModel, n_microbatches: int, devices: Sequence[torch.device], *, training: bool) -> tuple[Program, ...]:
    """Emit a forward. Programs return the tuple of ``lowered.returned`` over the batch; in training also inputs of ``emit_backward``."""
    scripts = sweep_scripts(lowered, n_microbatches, ActionKind.FORWARD, share_outputs=True)
    tags = number_messages(scripts)
    programs = []
    for rank, script in enumerate(scripts):
        emitter = StageEmitter(lowered, rank, n_microbatches, tags)
        emitter.prepare(devices[rank])
        outputs = _run_forwards(emitter, script, training=training)
        result = (outputs, tuple(emitter.saved.values())) if training else outputs
        programs.append(_program("forward", lowered, rank, emitter.finish(result, f"Rank{rank}Forward")))
    return tuple(programs)


def emit_backward(lowered: SplitModel, n_microbatches: int, given: frozenset[str], devices: Sequence[torch.device]) -> tuple[Program, ...]:
    """Emit the backward of a forward.

    Programs take ``batch``, ``saved`` and on collectors ``output_gradients``, for each of ``differentiated_outputs``; they return the
    gradients of inputs.

    Args:
        given: the outputs whose gradients are not mere zeros: what depends on no other keeps no gradient.
    """
    stored = reached_gradients(lowered, given)
    scripts = sweep_scripts(lowered, n_microbatches, ActionKind.BACKWARD, share_outputs=False)
    tags = number_messages(scripts)
    programs = []
    for rank, script in enumerate(scripts):
        extra = ("saved", "output_gradients") if rank in lowered.collectors else ("saved",)
        emitter = StageEmitter(lowered, rank, n_microbatches, tags, extra)
        emitter.prepare(devices[rank], stored)
        for index, key in enumerate(_saved_keys(lowered, rank, n_microbatches)):
            emitter.saved[key] = emitter.item(emitter.inputs["saved"], index, f"stage{key[0]}_saved_mb{key[1]}")
        if rank in lowered.collectors:
            emitter.section = "gradients of the results, by microbatch"
            _cut_output_gradients(emitter)
        _run_backwards(emitter, script)
        programs.append(_program("backward", lowered, rank, emitter.finish(emitter.input_gradients(), f"Rank{rank}Backward")))
    return tuple(programs)


def emit_call(lowered: SplitModel, n_microbatches: int, devices: Sequence[torch.device]) -> tuple[Program, ...]:
    """Emit a forward, a loss of its results on every rank, and its backward as one program, for inspection.

    Programs take the arguments of a training step, and return the results beside the loss, since the caller holds them.
    """
    forwards = sweep_scripts(lowered, n_microbatches, ActionKind.FORWARD, share_outputs=True)
    backwards = sweep_scripts(lowered, n_microbatches, ActionKind.BACKWARD, share_outputs=False)
    tags = number_messages([(*forward, *backward) for forward, backward in zip(forwards, backwards, strict=True)])
    programs = []
    for rank, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
        emitter = StageEmitter(lowered, rank, n_microbatches, tags, ("target", "loss_fn"))
        emitter.prepare(devices[rank])
        outputs = _run_forwards(emitter, forward, training=True)
        _loss_of_all_rows(emitter, LossForm("batch"), outputs)
        _run_backwards(emitter, backward)
        result = ((emitter.values["loss", None], *outputs), emitter.input_gradients())
        programs.append(_program("train_step", lowered, rank, emitter.finish(result, f"Rank{rank}Call")))
    return tuple(programs)


def _run_forwards(emitter: StageEmitter, script: Script, *, training: bool) -> tuple[fx.Node, ...]:
    """Write the forwards of a script, whose last item shares the results; return these over the batch."""
    emitter.gather_parameters((item.action for item in script), training=training)
    for position, item in enumerate(script[:-1]):
        assert item.action is not None
        emitter.section = item.action
        emitter.post(script[position : position + 1 + LOOKAHEAD])
        _run(emitter, item.action, training=training)
        _send_all(emitter, item)
    emitter.section = "results"
    return _outputs(emitter, script[-1], emitter.lowered.returned)


def _run_backwards(emitter: StageEmitter, script: Script) -> None:
    """Write the backwards of a script, and the sums of gradients after them."""
    for position, item in enumerate(script):
        emitter.section = item.action or emitter.section
        emitter.post(script[position : position + 1 + LOOKAHEAD])
        if item.action is not None:
            emitter.backward(item.action)
        _send_all(emitter, item)
        if item.action is not None:
            emitter.scatter_gradients(item.action)
    emitter.section = "gradients of parameters"
    emitter.store_gradients()
    emitter.section = "gradients of inputs"


def _program(kind: ProgramKind, lowered: SplitModel, rank: int, module: fx.GraphModule) -> Program:
    return Program(kind, rank, module, tuple(stage.index for stage in lowered.stages_of(rank)))


def _run(emitter: StageEmitter, action: Action, *, training: bool) -> None:
    if action.kind is ActionKind.FORWARD:
        emitter.forward(action, training=training)
    else:
        emitter.backward(action)


def _send_all(emitter: StageEmitter, item: Item) -> None:
    for message in item.sends:
        if message.kind == "gradient":
            assert message.microbatch is not None
            emitter.send(message, emitter.value_gradients[message.value, message.microbatch, message.consumer])
        elif message.kind == "activation" or message.microbatch is None:
            emitter.send(message, emitter.values[message.value, message.microbatch])
        else:
            emitter.send(message, emitter.value(message.value, message.microbatch))


# -- the loss ----------------------------------------------------------------------------------------------------------------------


def _loss_of_microbatch(emitter: StageEmitter, microbatch: int, form: LossForm, losses: list[fx.Node]) -> None:
    """Emit the loss of one microbatch and its gradients, on the ranks that collect the model's results."""
    emitter.section = f"loss of microbatch {microbatch}"
    lowered = emitter.lowered
    if not losses:
        emitter.targets = emitter.call(split_target, (emitter.inputs["target"], emitter.sizes()), "target_parts")
        part = lowered.graph.part
        parts = (part.n_row_parts,) if part.results == "loss" and part.n_row_parts > 1 else ()
        if form.is_weighted:
            emitter.weights = emitter.inputs["loss_weights"]
        else:
            emitter.weights = emitter.call(microbatch_weights, (emitter.sizes(), form.reduction, *parts), "weights")
    values = [emitter.value(name, microbatch) for name in lowered.returned]
    target = emitter.item(emitter.targets, microbatch, f"target_mb{microbatch}")
    weight = emitter.item(emitter.weights, microbatch, f"weight_mb{microbatch}")
    arguments = (values, target, emitter.inputs["loss_fn"], weight, emitter.size(microbatch))
    call = emitter.call_module("loss", lambda: _loss_call(lowered, form), arguments, f"loss_call_mb{microbatch}")
    losses.append(emitter.item(call, 0, f"loss_mb{microbatch}"))
    for position, name in enumerate(differentiated_outputs(lowered)):
        node = emitter.item(call, 1 + position, f"{name}_gradient_of_loss_mb{microbatch}")
        emitter.value_gradients[name, microbatch, -1] = node
    if len(losses) == len(emitter.collected):
        emitter.values["loss", None] = emitter.call(total, (list(losses),), "loss_of_batch")
        emitter.values["loss", None].meta["dtype"] = form.dtype


def _loss_call(lowered: SplitModel, form: LossForm) -> LossCall:
    outputs, returned = lowered.graph.loss_results, lowered.returned
    leaves = [None if output.node is None else returned.index(output.node) for output in outputs]
    tracked = [index for index, name in enumerate(returned) if name in lowered.requiring]
    differentiated = [returned.index(name) for name in differentiated_outputs(lowered)]
    constants = [output.constant for output in outputs]
    kind = {"draws": form.draws, "changes": form.changes}
    return LossCall(leaves, constants, lowered.graph.loss_tree, tracked, differentiated, lowered.graph.autocast, **kind)


def _loss_of_all_rows(emitter: StageEmitter, form: LossForm, values: Sequence[fx.Node]) -> None:
    """Emit the loss of the results of all microbatches at once, ``values``, and its gradients, cut into microbatches."""
    emitter.section = "loss of all rows"
    lowered = emitter.lowered
    rows = emitter.batch
    if of_ranks := _ranks_sharding_rows(lowered):
        rows = emitter.call(operator.mul, (emitter.batch, *of_ranks), "rows_of_all_ranks")
    arguments = (list(values), emitter.inputs["target"], emitter.inputs["loss_fn"], 1.0, rows)
    call = emitter.call_module("loss", lambda: _loss_call(lowered, form), arguments, "loss_call")
    loss = emitter.item(call, 0, "loss_of_batch")
    if emitter.rank != lowered.collectors[0]:  # it has the same loss, and the sum over ranks counts the first
        loss = emitter.call(torch.zeros_like, (loss,), "loss_of_another_rank")
    loss.meta["dtype"] = form.dtype
    emitter.values["loss", None] = loss
    for position, name in enumerate(differentiated_outputs(lowered)):
        _cut_gradient(emitter, name, emitter.item(call, 1 + position, f"{name}_gradient_of_loss"))


def _ranks_sharding_rows(lowered: SplitModel) -> tuple[int, ...]:
    """Return (number of ranks that shard the batch,) if results have the rows of all of them, rank after rank; else ()."""
    part = lowered.graph.part
    return (part.n_row_parts,) if part.results == "whole" and part.n_row_parts > 1 else ()


def _loss_of_batch(emitter: StageEmitter, script: Script, form: LossForm) -> fx.Node:
    """Return the loss on every rank: received from the only collector, or all_reduced if several collectors have parts of it."""
    own = emitter.values.get(("loss", None))
    if len(emitter.lowered.collectors) == 1:
        return emitter.arrive(next(each for item in script for each in item.needs if each.kind == "loss")) if own is None else own
    if own is None:
        own = emitter.call(torch.zeros, ((),), "no_loss", dtype=form.dtype, device=emitter.device)
    pending = emitter.call(all_reduce, ([own],), "all_reduce_loss_of_microbatches", group=tuple(range(emitter.lowered.n_ranks)))
    pending.meta["reduces"], pending.meta["bytes"] = ("loss",), form.dtype.itemsize
    return emitter.item(emitter.call(wait, (pending,), "loss_parts"), 0, "loss_of_all_microbatches")


# -- outputs -----------------------------------------------------------------------------------------------------------------------


def _outputs(emitter: StageEmitter, end: Item, names: Sequence[str]) -> tuple[fx.Node, ...]:
    """Emit some of the model's results over the batch: concatenated on collectors, received on other ranks.

    Where several ranks collect, each has some microbatches, and all ranks put them together.
    """
    if len(emitter.lowered.collectors) > 1:
        emitter.post((end,))
        _send_all(emitter, end)
        return tuple(_over_batch(emitter, name) for name in names)
    if emitter.rank in emitter.lowered.collectors:
        for name in names:
            emitter.values[name, None] = _over_batch(emitter, name)
        _send_all(emitter, end)
        return tuple(emitter.values[name, None] for name in names)
    emitter.post((end,))
    arrived = {message.value: emitter.arrive(message) for message in end.needs}
    return tuple(arrived[name] for name in names)


def _over_batch(emitter: StageEmitter, name: str) -> fx.Node:
    """Write a result of the model over the batch, from its microbatches: concatenated, averaged by size, or summed."""
    output = next(output for output in emitter.lowered.graph.outputs if output.node == name)
    parts = [_result(emitter, name, microbatch) for microbatch in range(emitter.n_microbatches)]
    if len(parts) == 1 or output.combine == "same":
        return parts[0]
    if output.combine == "concatenate":
        return emitter.call(concatenate, (parts, output.batch_dim, *_ranks_sharding_rows(emitter.lowered)), f"{name}_batch")
    if output.combine == "mean":
        return emitter.call(weighted_total, (parts, _mean_weights(emitter)), f"{name}_batch")
    assert output.combine == "sum", "a result that mixes the batch has one microbatch"
    return emitter.call(total, (parts,), f"{name}_batch")


def _result(emitter: StageEmitter, name: str, microbatch: int) -> fx.Node:
    """Return one microbatch of a result: collected by this rank, or received from the rank that collects it."""
    if microbatch in emitter.collected:
        return emitter.value(name, microbatch)
    return emitter.arrive(Message("output", name, microbatch, -1, emitter.lowered.rank_of(-1, microbatch), emitter.rank))


def _mean_weights(emitter: StageEmitter) -> fx.Node:
    return emitter.call(microbatch_weights, (emitter.sizes(), "mean"), "weights")


def _saved_keys(lowered: SplitModel, rank: int, n_microbatches: int) -> list[tuple[int, int]]:
    """Return the order in which a forward program returns its saved values."""
    stages = [stage.index for stage in lowered.stages_of(rank)]
    return [(stage, number) for stage in stages for number in range(n_microbatches) if lowered.rank_of(stage, number) == rank]


def _cut_output_gradients(emitter: StageEmitter) -> None:
    """Split the gradients of all results over the batch into those of microbatches."""
    lowered = emitter.lowered
    for position, name in enumerate(differentiated_outputs(lowered)):
        output = next(output for output in lowered.graph.outputs if output.node == name)
        gradient = emitter.item(emitter.inputs["output_gradients"], position, f"{name}_gradient")
        gradient.meta["val"] = emitter.fake_over_batch(name, output.batch_dim)
        _cut_gradient(emitter, name, gradient)


def _cut_gradient(emitter: StageEmitter, name: str, gradient: fx.Node) -> None:
    """Split the gradient of one result over the batch into those of microbatches, by the result's way of combining.

    It comes from the loss of all rows, or from the caller of a backward program.
    """
    output = next(output for output in emitter.lowered.graph.outputs if output.node == name)
    parts = None
    if output.combine == "concatenate" and emitter.n_microbatches > 1:
        arguments = (gradient, emitter.sizes(), output.batch_dim, *_ranks_sharding_rows(emitter.lowered))
        parts = emitter.call(split_batch, arguments, f"{name}_gradient_parts")
    for microbatch in emitter.collected:
        label = f"{name}_gradient_of_loss_mb{microbatch}"
        part = gradient if parts is None else emitter.item(parts, microbatch, label)
        if output.combine == "mean" and emitter.n_microbatches > 1:
            weight = emitter.item(_mean_weights(emitter), microbatch, f"weight_mb{microbatch}")
            part = emitter.call(torch.mul, (gradient, weight), label)
        elif output.combine == "same" and microbatch > 0:
            part = emitter.call(torch.zeros_like, (gradient,), label)
        emitter.value_gradients[name, microbatch, -1] = part
