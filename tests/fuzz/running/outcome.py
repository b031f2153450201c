"""Run a case beside the unpartitioned model and say how it ended."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from partitioner import PartitionError, VerificationError, partition
from tests.fuzz.programs.generator import Case
from tests.fuzz.programs.losses import check_changes, loss_function
from tests.fuzz.programs.program import Program, build, make_inputs
from tests.fuzz.running.comparison import DifferenceError, LargestValue, compare_with_noise, disturb
from tests.fuzz.running.derivative import is_fault_of_model
from tests.fuzz.running.observations import Reference, observations
from tests.fuzz.running.precision import converted, default_dtype, noise_of, unconverted


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: ``"equal"``, ``"refused"``, ``"wrong"``, ``"raw"``, ``"timeout"``, or ``"invalid"`` where the model itself does not run.
        reason: what a failure is recognised by while it is reduced: what differs, which error, where.
        detail: figures or a traceback.
    """

    kind: str
    reason: str = ""
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in {"wrong", "raw", "timeout"}


def run_case(case: Case, on_reference: Callable[[], None] = lambda: None, process: int | None = None) -> Outcome:
    """Return the case's outcome. The default dtype is that of its precision meanwhile, float64 without one.

    Args:
        on_reference: called when the unpartitioned model has run: a process that ends before has been ended by PyTorch alone.
        process: the rank of this process, where each rank is one; it then makes every call, as the others do, whatever differs.
    """
    with default_dtype(case.configuration.precision):
        return _run(case, on_reference, process)


def _run(case: Case, on_reference: Callable[[], None], process: int | None) -> Outcome:
    program, precision = case.program, case.configuration.precision
    calls_backward = process is None or "pipeline" not in case.configuration.mesh
    try:
        model = converted(build(program), precision)
        trains = _trains(program, model)
        one_piece = functools.partial(Reference, is_partitioned=False, calls_backward=calls_backward, trains=trains, precision=precision)
        expected = list(observations(one_piece(copy.deepcopy(model)), program))
        with LargestValue() as largest:
            allowed = [_disturbed_observations(model, program, one_piece, 1)]
    except Exception as error:  # noqa: BLE001  a reduced program need not run
        return Outcome("invalid", type(error).__name__, str(error))
    on_reference()
    try:
        pm = _partitioned(case, unconverted(model, precision))
        # Processes need not be seeded alike: what is drawn is what the first would draw.
        seed = 1000 * process if process is not None and program.seed % 4 == 0 else 0
        side = Reference(pm, is_partitioned=True, seed=seed, calls_backward=calls_backward, trains=trains)
        noisy = functools.partial(_disturbed_observations, model, program, one_piece)
        found = _difference(expected, observations(side, program), allowed, noisy, largest.value, precision, is_alone=process is None)
    except PartitionError as error:
        # A proof that fails is a defect of a pass, and no plan was given that could be wrong.
        is_ours = isinstance(error, VerificationError) or str(error).startswith("plan.")
        return Outcome("raw" if is_ours else "refused", f"{type(error).__name__}: {refusal_class(str(error))}", str(error))
    except Exception as error:  # noqa: BLE001  whatever comes from inside is what we look for
        return Outcome("raw", f"{type(error).__name__} at {_place(error)}", traceback.format_exc())
    if found is None:
        return Outcome("equal")
    if (
        precision is None
        and found.what in ("gradients of parameters", "gradients of inputs")
        and is_fault_of_model(program, model, found.wanted, found.got)
    ):
        return Outcome("invalid", "PyTorch's gradient is no derivative", found.detail)
    return Outcome("wrong", found.what, found.detail)


def _trains(program: Program, model: nn.Module) -> bool:
    """Return whether the loss of a call has a gradient by a parameter."""
    model = copy.deepcopy(model)
    args, kwargs, target = make_inputs(program, program.rows, is_switched=program.usage.starts_switched)
    output = model(*args, **kwargs)
    check_changes(program, output)
    loss = loss_function(program, model)(output, target)
    if loss.requires_grad:
        loss.backward()
    return any(parameter.grad is not None for parameter in model.parameters())


def _partitioned(case: Case, model: nn.Module) -> nn.Module:
    program, arguments = case.program, case.configuration.arguments()
    args, kwargs, _ = make_inputs(program, program.rows, is_switched=program.usage.starts_switched)
    if program.usage.batch_dims and "batch_dims" in inspect.signature(partition).parameters:
        arguments["batch_dims"] = dict(program.usage.batch_dims)
    return partition(model, example_inputs=args, example_kwargs=kwargs, **arguments)


def _disturbed_observations(
    model: nn.Module, program: Program, one_piece: functools.partial[Reference], draw: int
) -> list[tuple[str, Any]]:
    """Return the observations of the unpartitioned model with inputs and parameters moved by noise."""
    noise = noise_of(one_piece.keywords["precision"])
    disturbed = one_piece(copy.deepcopy(model), noise=noise, draw=draw)
    disturb(list(disturbed.module.parameters()), noise, draw)
    return list(observations(disturbed, program))


@dataclass(frozen=True)
class _Difference:
    """The first observation that differs."""

    what: str
    detail: str
    wanted: Any
    got: Any


def _difference(
    expected: list[tuple[str, Any]],
    observed: Iterator[tuple[str, Any]],
    allowed: list[list[tuple[str, Any]]],
    noisy: Callable[[int], Any],
    largest: float,
    precision: str | None,
    *,
    is_alone: bool,
) -> _Difference | None:
    """Return the first difference; in processes all calls are still made, since other processes wait for them."""
    found: _Difference | None = None
    for index, ((what, wanted), (_, got)) in enumerate(zip(expected, observed, strict=True)):
        if found is not None:
            continue
        try:
            compare_with_noise(what, wanted, got, index, allowed, noisy, largest, precision)
        except DifferenceError as error:
            found = _Difference(error.what, error.detail, wanted, got)
            if is_alone:
                return found
    return found


def _place(error: BaseException) -> str:
    """Return the last frame of ours that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(f"/{name}/" in frame.filename for name in ("partitioner", "passes", "cost_models"))]
    last = ours[-1] if ours else frames[-1]
    return f"{'/'.join(last.filename.split('/')[-2:])}:{last.name}"


def refusal_class(text: str) -> str:
    """Return the first line of a refusal without names and numbers."""
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "..", text.splitlines()[0])
    line = re.sub(r"\b[vx]?\w*\d[\w.]*", "N", line)
    return line[:110]
