"""Run the training step inside of a call, for loops whose loss is the one that the model returns.

    with pm.loss_in_step.on():
        output = pm(input_ids, labels=labels)     the whole step, by the plan's schedule; gradients are kept aside
        output.loss.backward()                    adds them to .grad, times the gradient of the loss
        output.logits.argmax(-1)                  a result that is read: the forward runs again, and later calls run all forwards first

A gradient of what a loop computes from the loss is one number times that of the loss, so dividing it by the steps of an accumulation, or
weighting it, is exact. Where a step would not be, calls run all forwards first, and the reason is said once.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partitioner.model.served_trace import ServedTrace
from partitioner.model.steps.autograd import Versions, tracked_call
from partitioner.model.steps.gradient_accumulation import Accumulation
from partitioner.model.steps.train_step import StepArguments, prepare_step
from partitioner.model.steps.unread_output import UnreadOutput, read
from partitioner.runtime.arguments import BoundInputs
from partitioner.runtime.state.hooks import has_hooks
from partitioner.schedules.catalog import interleaves
from partitioner.specialize.traces import Match
from passes.graph.schemas import draws
from passes.ir.errors import ConfigError, PartitionWarning, first_few, level_of_caller
from passes.normalize.loss_alone import own_loss

Call = Callable[[], Sequence[Tensor]]
"""Runs the forward of a call, with all forwards first; returns its results, which autograd tracks."""


class LossInStep:
    """Runs steps inside of calls while it is on, and remembers which loops read results besides the loss.

    Args:
        accumulation: of the model.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self._is_on = False
        self._reads_loss_alone = False
        self._facts: weakref.WeakKeyDictionary[ServedTrace, _Facts] = weakref.WeakKeyDictionary()
        self._reads: weakref.WeakKeyDictionary[ServedTrace, bool] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()
        self._unread: list[weakref.ref[UnreadOutput]] | None = None

    @contextlib.contextmanager
    def on(self, *, reads_loss_alone: bool = False) -> Iterator[None]:
        """Run steps inside of calls. At the end, results that are still there are computed: the loop keeps them.

        Args:
            reads_loss_alone: whether the loop is known to read no result but the loss.
        """
        before = self._is_on, self._reads_loss_alone, self._unread
        self._is_on, self._reads_loss_alone, self._unread = True, reads_loss_alone, []
        try:
            yield
            for each in [reference() for reference in self._unread]:
                if each is not None and each.is_current():
                    read(each)
        finally:
            self._is_on, self._reads_loss_alone, self._unread = before

    def switch_on(self) -> None:
        """Run steps inside of calls from now on."""
        self._is_on = True

    def results(self, match: Match[ServedTrace], inputs: BoundInputs, call: Call) -> Sequence[Tensor]:
        """Return the results of a call that autograd tracks: of a step that has run, or of ``call``. Every rank must call it."""
        served = match.planned
        graph = served.trace.graph
        if not (self._is_on and graph.training and interleaves(served.trace.plan)) or graph.writes or graph.edits:
            return call()  # a step gives no new values of inputs, and no attributes of modules
        if served not in self._facts:
            self._facts[served] = _Facts.of(served)
        facts = self._facts[served]
        if (reason := self._why_not(served, facts)) is not None:
            self._say(f"all forwards of the pipeline come before its backwards, whatever the schedule: {reason}")
            return call()
        if self._is_read(served):
            return call()
        if served not in self._reads and not self._reads_loss_alone and not facts.may_run_again:
            self._reads[served] = False
            return [each if number == facts.loss else self._watched(served, each) for number, each in enumerate(call())]
        return self._step(match, inputs, facts, call)

    def _is_read(self, served: ServedTrace) -> bool:
        """Return whether a loop reads results of this trace besides the loss; what one rank has seen, all do."""
        runtime = served.trace.runtime
        answer = runtime.agree("results that the loop reads", "some" if self._reads.get(served) else None, in_step=True)
        if answer is not None and not self._reads.get(served):
            self._reads[served] = True
        return answer is not None

    def _why_not(self, served: ServedTrace, facts: _Facts) -> str | None:
        """Return why a step inside of a call would not be exact, in words; None if it is."""
        graph, parameters = served.trace.graph, served.calls.parameters
        if facts.loss is None:
            return "the call returns no loss of its own, which train_step() would need; let the model take the labels and return its loss"
        dtypes = {parameter.dtype for parameter in parameters} | ({graph.autocast.dtype} if graph.autocast is not None else set())
        if torch.float16 in dtypes:
            return "gradients in float16 need the scaled loss before the backward"
        if served.calls.views:
            return "results of the call share memory, or are parameters or buffers"
        if len(graph.leaves) < len(graph.outputs):
            return "forward writes into its arguments, or leaves tensors on modules"
        if graph.batch is None:
            return "the model is traced for each batch size"
        if self._accumulation.gradients == "add":
            return "gradients of no_sync() wait for their sum"
        if any(map(has_hooks, parameters)):
            return "a parameter has a hook, which backward() calls"
        return None

    def _step(self, match: Match[ServedTrace], inputs: BoundInputs, facts: _Facts, call: Call) -> Sequence[Tensor]:
        """Run the step; return the loss, and stand-ins for all other results."""
        served = match.planned
        gradients, calls = served.trace.state.gradients, served.calls
        states = _RandomStates(served.trace.runtime.devices if facts.draws else ())
        buffers = Versions.of(calls.named_buffers(), ())
        step = prepare_step(match, inputs, StepArguments())
        kinds = step.served.calls.result_shapes(calls.rows_passed(inputs.batch))

        def forward() -> tuple[tuple[Tensor, ...], Any]:
            with gradients.aside() as of_parameters:
                loss, of_inputs = step.run()
            return (loss.reshape(kinds[facts.loss or 0][0]).clone(),), (of_parameters, of_inputs)

        def backward(kept: Any, received: tuple[Tensor | None, ...], wants_parameters: bool) -> tuple[Tensor | None, ...]:
            (factor,), (of_parameters, of_inputs) = received, kept
            if factor is None:
                return (None,) * len(of_inputs)
            factor = factor.reshape(())
            if wants_parameters:
                gradients.add_scaled(of_parameters, factor)
            return tuple(None if each is None else each * factor.to(each.device) for each in of_inputs)

        (loss,) = tracked_call(calls, inputs, step.input_names, forward, backward, (True,))
        has_written = bool(buffers.changed())
        versions = Versions.of(calls.named_tensors(inputs), ())

        def is_current() -> bool:
            return not (has_written or versions.changed())

        again: list[Sequence[Tensor]] = []

        def other(number: int) -> Tensor:
            if not again:
                self._note_read(served)
                _check_unchanged(versions, has_written=has_written)
                with states.restored(), torch.enable_grad():
                    results = call()
                _check_equal(results[facts.loss or 0], loss)
                again.append(results)
            return again[0][number]

        numbers = range(len(kinds))
        return [
            loss if each == facts.loss else self._stand_in(*kinds[each], loss.device, partial(other, each), is_current) for each in numbers
        ]

    def _stand_in(
        self, shape: list[int], dtype: torch.dtype, device: torch.device, compute: Callable[[], Tensor], is_current: Callable[[], bool]
    ) -> Tensor:
        """Return a stand-in for a result, which is computed when it is read."""
        output = UnreadOutput.of(shape, dtype, device, compute, is_current)
        if self._unread is not None:
            self._unread.append(weakref.ref(output))
        return output

    def _watched(self, served: ServedTrace, value: Tensor) -> Tensor:
        """Return a stand-in for a result that is there, which notes that it is read."""

        def found() -> Tensor:
            self._note_read(served)
            return value

        return self._stand_in(list(value.shape), value.dtype, value.device, found, lambda: True)

    def _note_read(self, served: ServedTrace) -> None:
        """Note that a loop reads results besides the loss, and warn that its calls then run all forwards before all backwards."""
        self._reads[served] = True
        self._say(
            "the loop reads a result besides the loss that the model returns, so that its calls run all forwards of the pipeline before "
            "its backwards, whatever the schedule; read it in evaluation, or let the model return its loss alone"
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, PartitionWarning, stacklevel=level_of_caller())


@dataclass(frozen=True)
class _Facts:
    """Facts that decide whether a step may run inside the calls of a trace.

    Attributes:
        loss: number of the result that is the loss, among those that programs return; None: there is none.
        draws: whether the model draws random numbers.
        may_run_again: whether a forward of it leaves no trace, and no other process takes part in it.
    """

    loss: int | None
    draws: bool
    may_run_again: bool

    @classmethod
    def of(cls, served: ServedTrace) -> _Facts:
        """Return the facts of a trace."""
        graph, runtime = served.trace.graph, served.trace.runtime
        index = own_loss(graph)
        node = None if index is None else graph.leaves[index].node
        has_draws = any(draws(each) for each in graph.computing_nodes())
        is_alone = len(runtime.local_ranks) == runtime.n_ranks
        may_run_again = is_alone and not (graph.updates or graph.mixing or has_draws)
        return cls(None if node is None else list(graph.returned).index(node), has_draws, may_run_again)


class _RandomStates:
    """The random states of a process before a step; ``devices``: of its ranks, empty if the model draws no random numbers."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._accelerators = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        self._states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._accelerators)] if devices else []

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw inside as the step has drawn."""
        with torch.random.fork_rng(devices=self._accelerators, enabled=bool(self._states)):
            if self._states:
                torch.set_rng_state(self._states[0])
                for device, state in zip(self._accelerators, self._states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield


def _check_unchanged(versions: Versions, *, has_written: bool) -> None:
    """Raise ConfigError if a forward that runs again would not give what the step has computed."""
    remedy = "read it before optimizer.step(), and in the first step, too: calls then run all forwards first"
    if has_written:
        raise ConfigError("a result besides the loss is read, and the step that it is of has changed buffers", remedy=remedy)
    if names := [name for _, name in versions.changed()]:
        raise ConfigError(
            f"a result besides the loss is read after changes to {first_few(names)}, from which it is computed", remedy=remedy
        )


def _check_equal(again: Tensor, loss: Tensor) -> None:
    """Raise ConfigError if a forward that ran again drew other random numbers than the step."""
    if not torch.allclose(again.detach().float(), loss.detach().float(), rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ConfigError(
            "a result besides the loss is read, and a forward that runs again draws other random numbers than the step did",
            remedy="read it in the first step, too: calls then run all forwards first",
        )
