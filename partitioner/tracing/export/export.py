"""One call of ``torch.export``, made safe: one at a time, in the right mode, leaving the model as it was."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, ShapesCollection

from partitioner.tracing.autograd_functions import refuse_custom_functions
from partitioner.tracing.carried_attributes import (
    attributes_behind,
    attributes_of,
    changed_numbers,
    refuse_read_numbers,
    refuse_read_tensors,
    set_numbers,
)
from partitioner.tracing.export.guards import DecidedRandomChoices, questions_about_one_row
from partitioner.tracing.export.meta_models import autocast_as_cpu, meta_as_cpu
from partitioner.tracing.inputs.flatten import BatchLayout, ModelInputs
from partitioner.tracing.inputs.kv_caches import register_caches
from partitioner.tracing.repeated.find import rehearse
from partitioner.tracing.repeated.replay import traced_once, write_copies
from partitioner.tracing.restore import preserved
from passes.normalize.autocast.operation_lists import traced_in

__all__ = ["TRACING", "export"]

TRACING = threading.RLock()
"""Held while a model is traced: neither ``torch.export`` nor what is patched for it is thread-safe."""


def export(
    model: nn.Module, inputs: ModelInputs, training: bool, batch: Any = None, layout: BatchLayout | None = None, *, may_assume: bool = False
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Export a model in training IR: composite operations, parameters lifted to placeholders.

    Args:
        training: the mode to trace in; a model that is in it keeps the flag of every module.
        batch: what ``torch.export`` takes for a dynamic dimension; None makes every size static.
        layout: which leaves it is in.
        may_assume: trace on where a size has to be assumed something of, which ``shape_guards`` then reads; else it is an error.

    Returns:
        The program, and what the user should know, one sentence each.

    Raises:
        CustomFunctionError: the model applies a custom autograd function where gradients flow.
        TraceError: forward computes with an attribute that the call before has changed.
        Exception: whatever ``torch.export`` raises.
    """
    shapes: Any = ShapesCollection()
    if batch is not None and layout is not None:
        for index, dimension in layout.dimensions:
            shapes[inputs.leaves[index]] = {dimension: batch}
    register_caches()
    with contextlib.ExitStack() as stack:
        questions = stack.enter_context(questions_about_one_row())
        for context in (
            TRACING,
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            traced_in(inputs.autocast),
            autocast_as_cpu(inputs.autocast),
            meta_as_cpu(inputs.autocast),
            refuse_custom_functions(),
            DecidedRandomChoices(),
            preserved(model),
        ):
            stack.enter_context(context)
        warned = stack.enter_context(_quietly())
        before, after = attributes_of(model), stack.enter_context(attributes_behind(model))
        if model.training != training:
            model.train(training)
        _name_keywords(model, inputs.kwargs)
        program = _exported(model, inputs, shapes or None, may_assume=may_assume)
        kept = _kept_attributes(warned)
        refuse_read_tensors(model, before, kept, program)
        if changed := changed_numbers(before, after):
            set_numbers(model, changed)
            refuse_read_numbers(model, tuple(changed), program, _exported(model, inputs, shapes or None, may_assume=may_assume))
    return program, _notes(kept, questions)


def _exported(model: nn.Module, inputs: ModelInputs, shapes: Any, *, may_assume: bool) -> ExportedProgram:
    """Export with modules that repeat traced once; as the model is, where they cannot be written from one."""

    def run() -> ExportedProgram:
        return torch.export.export(
            model,
            inputs.args,
            inputs.kwargs,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=may_assume,
        )

    copies = rehearse(model, inputs.args, inputs.kwargs)
    if not copies:
        return run()
    try:
        with preserved(model), traced_once(model, copies):
            program = run()
        write_copies(program, copies)
    except Exception:  # noqa: BLE001  whatever it is, the trace of the model as it is has it, too, or does without
        return run()
    return program


def _name_keywords(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Give ``forward`` a signature that names what it takes as ``**kwargs``: there, ``torch.export`` fails on open sizes."""
    signature = inspect.signature(model.forward)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    others = [name for name in kwargs if name not in signature.parameters]
    if not others:
        return
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
    forward.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
    model.forward = forward


_ASSIGNED = re.compile(r"tensor attributes? (.+) (?:was|were) assigned during export")


def _kept_attributes(warned: Sequence[warnings.WarningMessage]) -> list[str]:
    """Attributes in which the model kept tensors: ``torch.export`` puts them back and warns."""
    found = [_ASSIGNED.search(str(warning.message)) for warning in warned]
    names = [name.removeprefix("self.") for match in found if match is not None for name in match[1].split(", ")]
    return sorted(dict.fromkeys(names))


def _notes(kept: Sequence[str], questions: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if kept:
        notes.append(f"the model keeps tensors in {', '.join(kept)} for later calls; partitioned, only its buffers are kept")
    if questions:
        where = ", ".join(questions)
        notes.append(f"the model asks whether its batch is of one row ({where}); partitioned, one row is computed as several are")
    return tuple(notes)


@contextlib.contextmanager
def _quietly() -> Iterator[list[warnings.WarningMessage]]:
    """PyTorch reports failures in its log and on stderr before it raises them; some are expected here, and all others are raised.

    Yields:
        What was warned of.
    """
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for logger in loggers for handler in logger.handlers]

    def is_no_failure(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    for handler in handlers:
        handler.addFilter(is_no_failure)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield warned
    finally:
        for handler in handlers:
            handler.removeFilter(is_no_failure)
