"""The result of ``partition``: a module that computes what the original computes, on all its devices."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor

from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.generation.generate import generate
from partitioner.model.inspection.inspected_model import InspectedModel
from partitioner.model.module.build_structure import build_structure, with_signature
from partitioner.model.module.call_checks import CallChecks, RegisteredTensors
from partitioner.model.module.copies import Pickled, copied_trace, copy_tensors, fill, pickled, restored_trace, tensors_of
from partitioner.model.module.questions import ANSWERS, refuse_call_in_ddp
from partitioner.model.module.save_pretrained import save_pretrained
from partitioner.model.served_trace import ServedTrace
from partitioner.model.steps.autograd import backward_of_inputs, outside_inference_mode, prepare_call, tracked_forward, tracks_gradients
from partitioner.model.steps.loss_in_step import LossInStep
from partitioner.model.steps.train_step import StepArguments, prepare_step
from partitioner.options.precision import converted_inputs
from partitioner.reports.check.check import Subject, check
from partitioner.reports.check.report import CheckReport
from partitioner.runtime.arguments import BoundInputs
from partitioner.runtime.state.optimizers.update_check import check_optimizers
from partitioner.runtime.state.parameters import check_values
from partitioner.specialize.make_trace import modes_of
from partitioner.specialize.trace import Trace
from partitioner.specialize.traces import Match
from passes.emit.programs import LossReduction
from passes.ir.arguments.checked import checked_arguments
from passes.ir.errors import TraceError


class PartitionedModel(InspectedModel):
    """A model whose layers run on several devices; returned by ``partition``.

    Call and train it like the original, or with ``train_step``. ``graphs`` are the programs of ranks; ``plan`` says where everything runs.
    """

    def __new__(cls, trace: Trace, left: LeftAttributes | None = None) -> Self:
        """Return an instance of a class of its own: ``inspect.signature`` of its ``forward`` is that of the model."""
        return cast(Self, super().__new__(with_signature(cls, trace.original)))

    def __init__(self, trace: Trace, left: LeftAttributes | None = None) -> None:
        super().__init__(trace, left)
        check_optimizers()
        self.loss_in_step = LossInStep(self._accumulation)
        """Runs steps inside of calls, for integrations."""
        source = (trace.original, trace.state, self._gathered, trace.tracing.structure, self._left)
        build_structure(self, *source, trace.tracing.modes)
        # The modules whose modes are saved and restored, without any that the user adds later.
        self._parts = tuple(self.modules())
        self._tensor_places = RegisteredTensors.of(self)
        self._checks = CallChecks(self, self._tensor_places, trace.state, trace.runtime)
        # All other attributes are the user's: ``own_attributes`` returns them, for copies and pickles.
        self._initial = frozenset({*vars(self), "_initial"})

    # -- running -------------------------------------------------------------------------------------------------------------------

    @outside_inference_mode
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the original: same structure, same values, on every rank.

        With ``inputs="local"`` results hold this rank's rows, and a number that the model returns (its loss) is that of the whole batch.
        A loss of this rank's rows has, as in DistributedDataParallel, the gradients of the mean over ranks; the whole batch's has its own.
        """
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise TraceError(
                "a partitioned model runs programs on several ranks and is no part of a graph that could be exported or partitioned again",
                remedy="pass the model itself: torch.export.export(model, ...), torch.jit.trace(model, ...), or partition the module "
                "around it as a whole",
            )
        if torch.compiler.is_compiling():
            from partitioner.model.uncompiled import call_uncompiled  # noqa: PLC0415  it imports Dynamo

            return call_uncompiled(self.forward, args, kwargs)
        self._tensor_places.refuse_replaced()
        match, inputs = self._match(args, kwargs, tracked=torch.is_grad_enabled())
        calls, call = match.served.calls, prepare_call(match.served, inputs)
        if not (call.differentiation.outputs and tracks_gradients(calls, inputs)):
            return calls.result(call.sharded, calls.run(call.sharded, call.forward, inputs)[self._here], inputs)
        self._checks.before_backward(in_no_sync=self._accumulation.holds)
        results = self.loss_in_step.results(match, inputs, lambda: tracked_forward(call, inputs, self._accumulation))
        return calls.result(call.sharded, results, inputs)

    def train_step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
        loss_reduction: LossReduction = "mean",
        **kwargs: Any,
    ) -> Tensor:
        """Run one forward and backward of the whole batch by the plan's schedule; gradients are added to ``.grad``.

        On the first step with a loss function, and whenever shapes change, it is proved from a trace of ``loss_fn`` that the losses of
        microbatches and of ranks add up to the loss of the batch. A mean that leaves targets out (``ignore_index``), or weighs them (by
        class, a mask), is combined by their weights.

        Args:
            args: the model's inputs: the whole batch, or this rank's rows of it with ``inputs="local"``. A rank whose stages read no
                input may pass none; a rank that computes no loss may pass no target.
            target: second argument of ``loss_fn``: tensors, in any structure, with the batch first, or where the results have it.
            loss_fn: ``loss_fn(output, target)``, a tensor of one number. None: the model returns its loss (``.loss``, or a scalar).
            loss_reduction: the reduction of ``loss_fn`` over the rows of the batch. ``"mean"`` or ``"sum"``: it is computed of each
                microbatch, on each rank that cuts the batch, and combined. ``"batch"``: a function of all rows at once (contrastive
                losses, RMSE). Then all forwards come first, every stage holds the activations of all microbatches, and
                ranks that cut the batch gather the model's outputs; with ``inputs="local"`` such a loss takes no target.
            kwargs: the model's keyword inputs.

        Returns:
            The loss of the batch, on every rank.

        Raises:
            ConfigError: inputs do not fit the trace, the loss is no tensor of one number, or contradicts ``loss_reduction``. Nothing is
                added to ``.grad`` then.
            CommunicationError: a rank could not communicate.
        """
        with torch.inference_mode(mode=False):  # with gradients, whatever is around the step
            self._checks.before_step(self, in_no_sync=self._accumulation.holds)
            match, inputs = self._match(args, kwargs, tracked=True)
            of_parameters = "sum" if self._is_alone and not self._accumulation.holds else self._accumulation.gradients
            step = prepare_step(match, inputs, StepArguments(target, loss_fn, loss_reduction, of_parameters))
            loss, gradients = step.run()
            if gradients:
                backward_of_inputs(inputs.tensors, step.input_names, gradients)
            return loss

    def generate(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Return the result of ``model.generate(input_ids, **kwargs)`` of transformers, computed by the ranks.

        Each rank caches the keys and values of its own heads, layers and rows. Prompts of any length and batches of any size are served,
        up to the number of positions of the model. Programs are lowered for lengths that are powers of two, when first needed.

        Args:
            input_ids: (batch, tokens), the same on every rank.
            kwargs: those of ``model.generate``: ``max_new_tokens``, ``attention_mask`` (0 for padding, in front), ``do_sample``, ...

        Raises:
            AttributeError: the model has no ``generate``.
            ConfigError: an argument is not supported, or there are more tokens than positions.
        """
        return generate(self._first, self._decoders, any(part.training for part in self._parts), input_ids, kwargs)

    def check(self, *args: Any, **kwargs: Any) -> CheckReport:
        """Run the original beside this model on one batch, forward and backward, and report the first value that differs.

        Pass the whole batch on every rank, also with ``inputs="local"``. Gradients, buffers and random states are restored afterwards.
        ``bool(report)`` says whether all is equal.
        """
        check_values(self._first.state)
        args, kwargs = converted_inputs((args, kwargs), self.traced.dtype)
        with torch.inference_mode(mode=False):
            call = self._traces.call(args, kwargs, tuple([part.training for part in self._parts]), tracked=True)
            match, _ = self._traces.find(call) or self._traces.make(call)
            trace = match.served.trace
            args, kwargs = trace.arguments.as_traced(args, kwargs)
            with_microbatches = functools.partial(self._with_microbatches, trace)
            with trace.tracing.structure.restored():
                return check(Subject(trace.original, trace.graph, trace.runtime, trace.state, with_microbatches), args, kwargs)

    def _with_microbatches(self, trace: Trace, count: int | None) -> PartitionedModel:
        """Return a model that shares tensors and programs, without a last step; with ``count`` microbatches unless that is None.

        ``trace``: for the sizes of the inputs that it is called with.
        """
        return PartitionedModel(trace.with_microbatches(count), self._left)

    @property
    def _here(self) -> int:
        return self._first.runtime.local_ranks[0]  # the rank whose results this process returns

    def _match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, tracked: bool) -> tuple[Match[ServedTrace], BoundInputs]:
        """Return the trace that serves a call, and its inputs, after bringing the parameters up to date."""
        self._checks.before_call(tracked=tracked)
        if not self._is_alone:
            refuse_call_in_ddp(self._first)
        modes = tuple([part.training for part in self._parts])
        call = self._traces.call(args, kwargs, modes, tracked=tracked)
        return self._traces.find(call) or self._traces.make(call)

    # -- inspection ----------------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module, else an attribute of the model; see ``attributes.read_attribute``."""
        if name in ANSWERS:
            return ANSWERS[name](self._first)
        if name == "save_pretrained":
            return save_pretrained(self._first, self)
        return super().__getattr__(name)

    def _get_name(self) -> str:
        """Return the name of the model's class, by which transformers' Trainer knows how a loss aligns labels."""
        return self._first.name

    # -- parameters ----------------------------------------------------------------------------------------------------------------

    # -- what a plan fixes ---------------------------------------------------------------------------------------------------------

    @checked_arguments()
    def train(self, mode: bool = True) -> Self:
        """Set training mode, or evaluation mode: the next call runs the other variant of the same weights, traced when it is first used.

        ``pm.encoder.eval()`` sets the modes of a part, as on the model. Every rank must call it.
        """
        return super().train(mode)

    # -- copies --------------------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedModel:
        """Return a model of the same plan with parameters and buffers of its own, without gradients. Every rank must call it."""
        copied = PartitionedModel(copied_trace(self._first))
        self._traces.copy_into(copied._traces)
        copy_tensors(self._first.state, copied._first.state)
        memo[id(self)] = copied
        memo.update({id(part): other for part, other in zip(self._parts, copied._parts, strict=True)})
        memo.update({id(old): new for old, new in zip(tensors_of(self), tensors_of(copied), strict=True)})
        copied.set_own(modes_of(self), copy.deepcopy(self.own_attributes(), memo))
        return copied

    def __copy__(self) -> PartitionedModel:
        """Return a model that shares parameters, buffers and programs."""
        copied = self._with_microbatches(self.traced, None)
        copied.set_own(modes_of(self), self.own_attributes())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model with the present values, its plan, and how it was traced; see ``partitioner.model.module.copies``."""
        return _restored, (pickled(self._first), modes_of(self), self.own_attributes())

    def own_attributes(self) -> dict[str, Any]:
        """Return attributes and hooks that were added since the model was partitioned."""
        added = {name: value for name, value in vars(self).items() if name not in self._initial}
        return added | {name: value for name, value in vars(self).items() if name.endswith("_hooks") and value}

    def set_own(self, modes: Sequence[bool], own: Mapping[str, Any]) -> None:
        """Set the modes of all modules, and attributes and hooks that were added."""
        for part, is_training in zip(self._parts, modes, strict=True):
            part.training = is_training
        vars(self).update(own)


def _restored(saved: Pickled, modes: Sequence[bool], own: Mapping[str, Any]) -> PartitionedModel:
    """Return the partitioned model of a pickle. With one rank a process, every rank must load its own."""
    pm = PartitionedModel(restored_trace(saved))
    fill(pm._first, saved)  # noqa: SLF001  of this module
    pm.set_own(modes, own)
    return pm
