"""One call of ``torch.export``, made safe: one at a time, in the right mode, leaving the model as it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from partitioner.tracing.carried.attributes import (
    Left,
    attributes_of,
    record_left,
    refuse_carried_values,
    refuse_read_tensors,
)
from partitioner.tracing.carried.decisions import Run, drawn_from, refuse_decisions
from partitioner.tracing.carried.generators import generators_of
from partitioner.tracing.carried.left_results import LeftByCall, keep_results
from partitioner.tracing.carried.program_state import Reading, preserve_program, reach_of
from partitioner.tracing.errors import checks_distribution
from partitioner.tracing.export.cumulative_averages import CumulativeAverages
from partitioner.tracing.export.distributions import UNCHECKED_NOTE, check_by_default, unchecked
from partitioner.tracing.export.fast_path import note_fast_paths
from partitioner.tracing.export.forward_context import entered_in_forward
from partitioner.tracing.export.guards import symbol_of
from partitioner.tracing.export.known_values import KnownValues, refuse_written_buffers
from partitioner.tracing.export.on_meta.constructed import attributes_as_cpu
from partitioner.tracing.export.replaced import TraceRecord, devices_as_cpu, replaced
from partitioner.tracing.export.watched_calls import WatchedCalls
from partitioner.tracing.inputs.flatten import BatchLayout, ModelInputs
from partitioner.tracing.inputs.kv_caches import register_caches
from partitioner.tracing.repeated.find import TRACED_ONE_BY_ONE, Copies, calls_of, find_copies, words_of
from partitioner.tracing.repeated.replay import NotCopyableError, trace_copies_once, write_copies
from partitioner.tracing.restore import preserve
from passes.graph.fake_tensors import plain_autograd
from passes.ir.torch_private import (
    records_as_dicts,
    tree_leaves,
    tree_unflatten,
)
from passes.normalize.autocast.operation_lists import traced_in

TRACING = threading.RLock()
"""Held while a model is traced: neither ``torch.export`` nor what is patched for it is thread-safe."""


@dataclass(frozen=True)
class Export:
    """A model exported once.

    Attributes:
        program: the result of ``torch.export``.
        notes: for the user, one sentence each.
        lines_about_one_row: the lines of the model that would decide otherwise for a batch of one row.
        gradient_questions: what code of the model asked of autograd's state.
        program_state: the plain state of the program that its code may have read.
        left: what it leaves in attributes of modules.
        deciding_buffers: the buffers whose values it decides by, with these values.
    """

    program: ExportedProgram
    notes: tuple[str, ...]
    lines_about_one_row: tuple[str, ...]
    gradient_questions: tuple[str, ...]
    program_state: tuple[Reading, ...]
    left: LeftByCall
    deciding_buffers: Mapping[str, Tensor]


def export(
    model: nn.Module,
    inputs: ModelInputs,
    training: bool,
    layout: BatchLayout | None = None,
    *,
    one_size: bool = True,
    others: Sequence[tuple[int, int]] = (),
) -> Export:
    """Export a model in training IR: composite operations, parameters lifted to placeholders.

    Args:
        training: the mode to trace in; a model that is in it keeps the flag of every module.
        layout: the dimensions of the inputs whose size is left open, as far as the model allows it; what it assumes of such a size is
            read by ``assumptions_of``. None makes every size static.
        one_size: whether they are the same size.
        others: further dimensions, pairs (leaf, dimension), whose sizes are left open, each by itself.

    Raises:
        CustomFunctionError: the model applies a custom autograd function, where gradients flow, that has no graph.
        AutogradUseError: forward asks for something that only the autograd engine does.
        TraceError: forward computes with an attribute that the call before has changed, or by what is no tensor and no argument.
        Exception: whatever ``torch.export`` raises.
    """
    options: dict[str, Any] = {"one_size": one_size, "others": others}
    try:
        return _export_once(model, inputs, training, layout, **options)
    except Exception as error:
        if not (checks_distribution(error) and check_by_default()):
            raise
    with unchecked():
        found = _export_once(model, inputs, training, layout, **options)
    return replace(found, notes=(*found.notes, UNCHECKED_NOTE))


def _export_once(
    model: nn.Module,
    inputs: ModelInputs,
    training: bool,
    layout: BatchLayout | None,
    *,
    one_size: bool,
    others: Sequence[tuple[int, int]],
) -> Export:
    shapes: Any = ShapesCollection()
    for index, dimensions in _by_leaf((*(() if layout is None else layout.dimensions), *others)).items():
        shapes[inputs.leaves[index]] = dict.fromkeys(dimensions, Dim.AUTO)
    register_caches()
    reach = reach_of(model)
    generators = generators_of(model, reach.objects.values())
    with contextlib.ExitStack() as stack:
        stack.enter_context(TRACING)
        stack.enter_context(torch.inference_mode(mode=False))  # restores gradients, too: as they are now
        stack.enter_context(torch.set_grad_enabled(inputs.with_gradients))  # sets them when it is made
        for context in (
            traced_in(inputs.autocast),
            plain_autograd(),
            preserve(model),
            drawn_from(generators),
            preserve_program(reach.readings),
        ):
            stack.enter_context(context)
        without_values = stack.enter_context(attributes_as_cpu(model))
        known = KnownValues(model, without_values)
        record = TraceRecord(known_values=known, cpu_devices=devices_as_cpu(inputs.autocast))
        stack.enter_context(replaced(record))
        watched = functools.partial(WatchedCalls, record.questions, CumulativeAverages(model))
        stack.enter_context(entered_in_forward(model, watched, functools.partial(_as_called, inputs)))
        stack.enter_context(_silence_torch())
        before = attributes_of(model)
        if model.training != training:
            model.train(training)
        of_fast_paths = note_fast_paths(model, inputs.autocast)
        _name_keywords(model, inputs.kwargs)
        if layout is not None and one_size:
            _equate_sizes(model, layout)
        slower: list[str] = []
        with drawn_from(generators) as drawn, record_left(model) as left:
            program = _export(model, inputs, shapes or None, slower, left)
        changed = _set_back(reach.readings)
        refuse_read_tensors(model, before, left, program)
        refuse_written_buffers(program, known.read)
        calls = functools.partial(calls_of, model, inputs.args, inputs.kwargs, slower)
        again = functools.partial(_export, model, inputs, None, slower)
        refuse_decisions(Run(model, calls, lambda: again(Left())), reach, drawn, changed)
        edits, lost = refuse_carried_values(model, before, left, calls, again)
        program.constants.update({name: without_values.get(id(value), value) for name, value in program.constants.items()})
        by_call = LeftByCall(keep_results(program, left.n_results, edits), is_pair=left.n_results > 0)
    lines = _lines_about_batch(record.comparisons, program, layout)
    notes = (*_notes(lines), *sorted(of_fast_paths), *dict.fromkeys(slower), *_lost_words(lost))
    return Export(program, notes, lines, tuple(sorted(record.questions)), tuple(reach.readings), by_call, known.read)


def _lost_words(names: Sequence[str]) -> Iterator[str]:
    """Yield the note on numbers that forward changes and a graph does not."""
    if names:
        them = "it" if len(names) == 1 else "them"
        yield f"calls leave {', '.join(names)} unchanged: forward changes {them} in every call, but not by adding the same count"


def _set_back(readings: Sequence[Reading]) -> list[tuple[Reading, dict[str, Any]]]:
    """Set state of the program that the traced call changed back; return the changes."""
    changed = [(reading, values) for reading in readings if (values := reading.changed())]
    for reading, values in changed:
        reading.set({name: reading.values[name] for name in values})
    return changed


def _export(model: nn.Module, inputs: ModelInputs, shapes: Any, slower: list[str], left: Left) -> ExportedProgram:
    """Call ``torch.export``: with repeated modules traced once if possible, else with the unchanged model.

    Args:
        slower: gets a note where repeated modules are traced one by one after all.
        left: filled during the trace with the attributes that forward leaves.
    """

    def run() -> ExportedProgram:
        args, kwargs = records_as_dicts((inputs.args, inputs.kwargs))
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        _erase_own_frames(program)
        return program

    copies = find_copies(model, inputs.args, inputs.kwargs, slower)
    if copies:
        try:
            with preserve(model), trace_copies_once(model, copies):
                program = run()
            _refuse_left(left, copies)
            write_copies(program, copies)
        except Exception as error:  # noqa: BLE001  an error of the model itself is raised again
            slower.append(f"{TRACED_ONE_BY_ONE}: {words_of(error)}")
        else:
            return program
    with preserve(model):
        return run()


def _as_called(inputs: ModelInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of ``forward`` with the dataclasses of the user's call, which ``torch.export`` does not take."""
    call = (inputs.args, inputs.kwargs)
    if records_as_dicts(call) is call or kwargs.keys() != inputs.kwargs.keys():
        return args, kwargs
    called: tuple[tuple[Any, ...], Mapping[str, Any]] = tree_unflatten(
        tree_leaves((args, {name: kwargs[name] for name in inputs.kwargs})), inputs.tree
    )
    return called


def _refuse_left(left: Left, copies: Sequence[Copies]) -> None:
    """Raise NotCopyableError if a template leaves something in attributes: its copies would leave as much."""
    templates = {group.template for group in copies}
    for edit in left.edits:
        if any(edit.module == template or edit.module.startswith(f"{template}.") for template in templates):
            raise NotCopyableError(f"{edit.name} is left by a call")


def _erase_own_frames(program: ExportedProgram) -> None:
    """Erase what this package puts around code of the model from the stack traces of nodes."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.meta.get("stack_trace") is not None:
                node.meta["stack_trace"] = _OWN_FRAMES.sub("", node.meta["stack_trace"])


_OWN_FRAMES = re.compile(rf'(?m)^ *File "{re.escape(str(Path(__file__).parents[1]))}[/\\][^"]*", line \d+, in .*\n?(?:    .*\n?)*')
"""A frame of this package in a stack trace, with its lines of code."""


def _by_leaf(dimensions: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Return leaf -> its dimensions among pairs (leaf, dimension)."""
    by_leaf: dict[int, list[int]] = {}
    for index, dimension in dimensions:
        by_leaf.setdefault(index, []).append(dimension)
    return by_leaf


def _lines_about_batch(
    comparisons: Sequence[tuple[sympy.Symbol, str]], program: ExportedProgram, layout: BatchLayout | None
) -> tuple[str, ...]:
    """Return the lines that compare the batch size with one; a length of one is traced by itself."""
    symbols = {symbol_of(program, *pair) for pair in layout.dimensions} if layout is not None else set()
    return tuple(dict.fromkeys(line for symbol, line in comparisons if symbol in symbols))


def _equate_sizes(model: nn.Module, layout: BatchLayout) -> None:
    """Let ``forward`` begin with a comparison of the sizes of a layout, which makes them one symbol."""
    (first, dimension), *others = layout.dimensions
    if not others:
        return
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        sizes = [leaves[index].shape[each] for index, each in others]
        assert all(size == leaves[first].shape[dimension] for size in sizes)
        return original(*args, **kwargs)

    model.forward = forward


def _name_keywords(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Replace ``**kwargs`` in the signature of ``forward`` by the names that are passed: ``torch.export`` fails on open sizes in it."""
    signature = inspect.signature(model.forward)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    unnamed = [name for name in kwargs if name not in signature.parameters]
    if not unnamed:
        return
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in unnamed]
    forward.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
    model.forward = forward


def _notes(comparisons: Sequence[str]) -> tuple[str, ...]:
    """Return a note about the lines that compare the batch size with one, if there are some."""
    where = ", ".join(comparisons)
    return (f"the model asks whether its batch is of one row ({where}); partitioned, one row is computed as several are",) if where else ()


@contextlib.contextmanager
def _silence_torch() -> Iterator[list[warnings.WarningMessage]]:
    """While active, drop torch's log messages and stderr, which repeat the errors that it raises; yield the list of warnings."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for logger in loggers for handler in logger.handlers]

    def is_below_warning(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    for handler in handlers:
        handler.addFilter(is_below_warning)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        for handler in handlers:
            handler.removeFilter(is_below_warning)
