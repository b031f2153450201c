"""Refuse a call where plain state of the program has changed since the trace, and the model computes otherwise with it.

STEP = 0; pm = partition(model, 2)       forward reads STEP of its module
STEP = 1; pm(x)                          the model runs on the meta device with 0 and with 1: other calls? then the change is refused
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partitioner.model.session import Session
from partitioner.runtime.state.stored_parameters import copy_of
from partitioner.tracing.carried.program_state import Reading
from partitioner.tracing.export.export import TRACING
from partitioner.tracing.export.replaced import TraceRecord, replaced
from partitioner.tracing.inputs.example import find_example_inputs
from partitioner.tracing.repeated.find import calls_of
from partitioner.tracing.restore import preserve
from passes.ir.errors import ConfigError
from passes.normalize.autocast.operation_lists import traced_in

__all__ = ["refuse_changed_buffers", "refuse_changed_program"]


def refuse_changed_program(session: Session, changed: Sequence[Reading]) -> None:
    """Take the values that the program has now for those of the trace, if the model computes the same with them.

    Raises:
        ConfigError: it does not.
    """
    now = [(reading, reading.changed()) for reading in changed]
    before = [(reading, {name: reading.values[name] for name in values}) for reading, values in now]
    if not _computes_alike(session, now, before):
        (reading, values), old = now[0], before[0][1]
        name = next(iter(values))
        raise ConfigError(
            f"{name} of {reading.owner} was {old.get(name)!r} when the model was traced and is {values.get(name)!r} now: programs compute "
            f"with the first",
            remedy="pass it to forward as an argument, as a tensor if it changes from call to call; or partition the model again",
        )
    for reading, values in now:
        reading.take(values)


def refuse_changed_buffers(session: Session) -> None:
    """Compare the buffers whose values decided the trace with these values. Every rank must call it.

    Raises:
        ConfigError: one of them has other values now.
    """
    with session.runtime.failing_together():
        for name, values in session.graph.deciding_buffers.items():
            for block, tensor in session.state.held(name) if session.state.knows(name) else ():
                if not torch.equal(copy_of(values, block, tensor.device), tensor):
                    raise ConfigError(
                        f"the buffer {name} has other values than when the model was traced, and these decided what programs compute",
                        remedy="load the values into the model and partition it again; or choose by torch.where instead of a decision",
                    )


def _computes_alike(
    session: Session, now: Sequence[tuple[Reading, dict[str, object]]], before: Sequence[tuple[Reading, dict[str, object]]]
) -> bool:
    if any(value is ... for _, values in now for value in values.values()):
        return False
    model, tracing = session.original, session.tracing
    args, kwargs = (
        (tracing.args or (), tracing.kwargs or {}) if (tracing.args, tracing.kwargs) != (None, None) else find_example_inputs(model)
    )

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
