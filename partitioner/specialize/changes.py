"""Refuse a call where state that decides what the model computes has changed since the trace.

STEP = 0; pm = partition(model, 2)       forward reads STEP of its module
STEP = 1; pm(x)                          the model runs on the meta device with 0 and with 1: other calls? then the change is refused
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partitioner.runtime.state.stored_parameters import copy_of
from partitioner.specialize.make_trace import example_of
from partitioner.specialize.trace import Trace
from partitioner.tracing.autograd.hooks import GRADIENTS_ON
from partitioner.tracing.carried.program_state import Reading, is_record, plain_attributes
from partitioner.tracing.export.export import TRACING
from partitioner.tracing.export.replaced import TraceRecord, replaced
from partitioner.tracing.repeated.find import calls_of
from partitioner.tracing.restore import preserve
from passes.ir.errors import ConfigError, first_few
from passes.ir.graph import ModelGraph
from passes.normalize.autocast.operation_lists import traced_in


def decides(graph: ModelGraph) -> bool:
    """Return whether state besides arguments and parameters decides what a trace computes, so that each call must check it."""
    return bool(graph.program_state or graph.deciding_buffers or graph.gradient_questions)


def refuse_changes(trace: Trace, *, tracked: bool) -> None:
    """Raise ConfigError where state that decides what the model computes has changed since the trace. Every rank must call it.

    Args:
        tracked: whether gradients are on.
    """
    changed = [reading for reading in trace.graph.program_state if reading.is_changed()]
    if changed:
        _refuse_changed_program(trace, changed)
    if trace.graph.deciding_buffers:
        _refuse_changed_buffers(trace)
    if trace.graph.gradient_questions:
        _refuse_frozen(trace, tracked=tracked)


def _refuse_changed_program(trace: Trace, changed: Sequence[Reading]) -> None:
    """Take the values that the program has now for those of the trace, if the model computes the same with them.

    Raises:
        ConfigError: it does not.
    """
    now = [(reading, values) for reading in changed if (values := reading.changed())]
    before = [(reading, {name: reading.values[name] for name in values}) for reading, values in now]
    if now and not _computes_alike(trace, now, before):
        (reading, values), old = now[0], before[0][1]
        name = next(iter(values))
        was, is_now = _words_of(old[name], values[name])
        raise ConfigError(
            f"{name} of {reading.owner} was {was} when the model was traced and is {is_now} now: programs compute with the first",
            remedy="pass it to forward as an argument, as a tensor if it changes from call to call; or partition the model again",
        )
    for reading, values in now:
        reading.take(values)


def _words_of(old: object, new: object) -> tuple[str, str]:
    """Return two values as texts: of objects of one class, the attributes in which they differ."""
    if not (is_record(old) and type(old) is type(new)):
        return repr(old), repr(new)
    attributes = plain_attributes(old), plain_attributes(new)
    names = sorted(name for name in attributes[0].keys() | attributes[1].keys() if attributes[0].get(name) != attributes[1].get(name))
    texts = (", ".join(f"{name}={each.get(name)!r}" for name in names) for each in attributes)
    was, is_now = (f"{type(old).__name__}({text})" for text in texts)
    return was, is_now


def _refuse_changed_buffers(trace: Trace) -> None:
    """Compare the buffers whose values decided the trace with these values. Every rank must call it.

    Raises:
        ConfigError: one of them has other values now.
    """
    with trace.runtime.failing_together():
        for name, values in trace.graph.deciding_buffers.items():
            for block, tensor in trace.state.held(name) if trace.state.knows(name) else ():
                if not torch.equal(copy_of(values, block, tensor.device), tensor):
                    raise ConfigError(
                        f"the buffer {name} has other values than when the model was traced, and these decided what programs compute",
                        remedy="load the values into the model and partition it again; or choose by torch.where instead of a decision",
                    )


def _computes_alike(
    trace: Trace, now: Sequence[tuple[Reading, dict[str, object]]], before: Sequence[tuple[Reading, dict[str, object]]]
) -> bool:
    if any(value is ... for _, values in now for value in values.values()):
        return False
    model, tracing = trace.original, trace.tracing
    args, kwargs = example_of(trace)

    def log() -> object:
        with preserve(model), traced_in(tracing.autocast), torch.set_grad_enabled(tracing.with_gradients):
            for module, is_training in zip(model.modules(), tracing.modes, strict=True):
                module.training = is_training
            return calls_of(model, args, kwargs, [])

    with TRACING, replaced(TraceRecord(), ["torch.compiler._is_compiling_flag"]):
        new = log()
        try:
            for reading, values in before:
                reading.set(values)
            old = log()
        finally:
            for reading, values in now:
                reading.set(values)
    return new is not None and new == old


def _refuse_frozen(trace: Trace, *, tracked: bool) -> None:
    """Raise ConfigError where code of the model asks which tensors require gradients, and another parameter does than in the trace."""
    questions = [question for question in trace.graph.gradient_questions if question != GRADIENTS_ON]
    trained = {name: trace.tracing.structure.trains(name) for name in trace.graph.parameters.values()}
    changes = {
        "frozen": [name for name, parameter in trace.state.named_parameters() if trained[name] and not parameter.requires_grad],
        "unfrozen": [name for name in trace.state.gradients.trained if not trained[name]],
    }
    for change, names in changes.items():
        if tracked and questions and names:
            raise ConfigError(
                f"{first_few(names)} was {change} after the model was partitioned, and its forward asks for {questions[0]} of its tensors",
                remedy="freeze, or unfreeze, the parameters of the model, and partition it again",
            )
