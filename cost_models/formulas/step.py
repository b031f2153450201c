"""A training step as formulas: time, memory and bytes moved, in batch, microbatches, replicas, device and links.

    rows       = batch / (microbatches * replicas)                                      of one microbatch
    busy       = FLOPs(rows) / flop_rate + bytes(rows) / memory_bandwidth + kernels * launch_overhead + messages(rows)
    step time  = (microbatches + bubble) * busy + what comes once a step                of the slowest rank
    memory     = state + activations(rows) * microbatches in flight                     of the fullest rank

Operations that multiply matrices are taken to be limited by arithmetic, all others by memory; where a product is too small for that,
the simulator (``pm.simulate``) knows better. The formulas hold for the plan that they were made from: axes, stages and schedule stay as
they are, and replicas are the ranks that share the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from cost_models.collectives import alpha_beta as communication
from cost_models.formulas.model import BATCH, ModelFormula
from cost_models.formulas.program import ROWS, Amount, Message, ProgramWork
from cost_models.formulas.symbols import readable
from cost_models.hardware.clusters import Link
from passes.ir.errors import ConfigError, did_you_mean
from passes.ir.tensor_spec import Size

MICROBATCHES, REPLICAS = sympy.symbols("microbatches replicas", positive=True)
FLOP_RATE, MEMORY_BANDWIDTH, LAUNCH_OVERHEAD = sympy.symbols("flop_rate memory_bandwidth launch_overhead", positive=True)

_MEANINGS = {
    "batch": "rows of a step",
    "microbatches": "parts of a step",
    "replicas": "groups of ranks that share the batch",
    "flop_rate": "FLOP/s that products reach",
    "memory_bandwidth": "B/s that memory reaches",
    "launch_overhead": "s to start a kernel",
}


@dataclass(frozen=True)
class StepShape:
    """The facts of a plan, beside its programs, that the formulas need.

    Attributes:
        bubble: idle time of a rank, in microbatches of work.
        in_flight: stage -> the most microbatches in flight; None: all of the step.
        dimension_of: ranks of a group -> its mesh dimension; ``"pipeline"`` between stages.
        replicated: the mesh dimensions that shard the batch.
        n_replicas: the number of ranks along these.
        states: tensors of the optimizer's state for each parameter.
    """

    bubble: sympy.Rational
    in_flight: Mapping[int, int | None]
    dimension_of: Mapping[tuple[int, ...], str]
    replicated: frozenset[str]
    n_replicas: int
    states: int


@dataclass(frozen=True)
class StepFormula:
    """The formulas of a plan.

    Attributes:
        step_time: seconds of a step.
        memory: peak bytes of the fullest rank.
        bytes_moved: bytes that the slowest rank sends in a step, by mesh dimension.
        defaults: the value of each symbol in the plan.
        model: the work of the unsharded model, in the batch and in the lengths of its sequences.
    """

    step_time: sympy.Expr
    memory: sympy.Expr
    bytes_moved: Mapping[str, sympy.Expr]
    defaults: Mapping[str, float]
    model: ModelFormula

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """Everything that may be varied, in the order of ``defaults``."""
        return tuple(sympy.Symbol(name, positive=True) for name in self.defaults)

    def evaluate(self, **values: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Evaluate step time and memory at numbers or at whole grids, which are broadcast against each other.

        Args:
            values: symbol -> numbers; the plan's own where nothing is given.

        Raises:
            ConfigError: there is no such symbol.
        """
        unknown = sorted(set(values) - set(self.defaults))
        if unknown:
            meant = did_you_mean(unknown[0], self.defaults, str)
            raise ConfigError(
                f"evaluate(): there is no symbol {', '.join(unknown)}", remedy=f"{meant}the symbols are {', '.join(self.defaults)}"
            )
        arrays = [np.asarray(values.get(name, default), dtype=np.float64) for name, default in self.defaults.items()]
        seconds, size = self._compiled(*arrays)
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        return np.broadcast_to(np.asarray(seconds, dtype=np.float64), shape), np.broadcast_to(np.asarray(size, dtype=np.float64), shape)

    @cached_property
    def _compiled(self) -> Any:
        functions = {"FloorDiv": np.floor_divide, "CeilDiv": lambda one, other: -np.floor_divide(-one, other)}
        return sympy.lambdify(self.symbols, [self.step_time, self.memory], modules=[functions, "numpy"], cse=True)

    def __str__(self) -> str:
        width = max(len(name) for name in self.defaults)
        lines = ["step time (s)", f"    {readable(self.step_time)}", "memory (bytes)", f"    {readable(self.memory)}"]
        for dimension, size in self.bytes_moved.items():
            lines += [f"bytes moved along {dimension}", f"    {readable(size)}"]
        lines += ["", "where"]
        for name, value in self.defaults.items():
            lines.append(f"    {name:<{width}}  {value:>10.4g}   {_meaning(name)}")
        return "\n".join([*lines, "", str(self.model)])


def step_formula(works: Sequence[ProgramWork], model: ModelFormula, shape: StepShape, defaults: Mapping[str, float]) -> StepFormula:
    """Return the formulas of a step, as maxima over the programs of all ranks.

    Args:
        works: of each rank's program.
        model: the work of the whole model.
        shape: the facts of the plan.
        defaults: the values of symbols in the plan; link symbols are ``latency_<dimension>`` and ``bandwidth_<dimension>``.
    """
    times = [_time(work, shape) for work in works]
    memory = [_memory(work, shape) for work in works]
    rows = BATCH / (MICROBATCHES * (REPLICAS if shape.replicated else 1))
    slowest = max(range(len(works)), key=lambda rank: float(_at(times[rank].subs(ROWS, rows), defaults)))
    moved: dict[str, Size] = {}
    for message in works[slowest].messages:
        dimension = _dimension(message, shape)
        moved[dimension] = moved.get(dimension, 0) + message.bytes * (MICROBATCHES if message.is_repeated else 1)
    found = {dimension: sympy.expand(sympy.sympify(size).subs(ROWS, rows)) for dimension, size in moved.items()}
    formulas = (_largest([each.subs(ROWS, rows) for each in parts]) for parts in (times, memory))
    step_time, size = formulas
    used = step_time.free_symbols | size.free_symbols
    varied = {name: value for name, value in defaults.items() if sympy.Symbol(name, positive=True) in used}
    return StepFormula(step_time, size, found, varied, model)


def _largest(parts: Sequence[sympy.Expr]) -> sympy.Expr:
    distinct: list[sympy.Expr] = []
    for part in dict.fromkeys(parts):
        if not any(_is_at_least(other, part) for other in distinct):
            distinct = [*(other for other in distinct if not _is_at_least(part, other)), part]
    return distinct[0] if len(distinct) == 1 else sympy.Max(*distinct, evaluate=False)


def _is_at_least(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Return whether ``one >= other`` is proved for all positive values of the symbols: no term of the difference is negative."""
    difference = sympy.expand(one - other)
    return not difference.has(sympy.Min) and all(term.is_nonnegative for term in sympy.Add.make_args(difference))


def _at(expression: sympy.Expr, values: Mapping[str, float]) -> sympy.Expr:
    return expression.subs({sympy.Symbol(name, positive=True): value for name, value in values.items()})


def _time(work: ProgramWork, shape: StepShape) -> sympy.Expr:
    messages = {True: sympy.Integer(0), False: sympy.Integer(0)}
    for message in work.messages:
        messages[message.is_repeated] += _message_time(message, shape)
    busy = _busy(work.repeated) + messages[True]
    return (MICROBATCHES + shape.bubble) * _collected(busy) + _collected(_busy(work.once) + messages[False])


def _busy(amount: Amount) -> sympy.Expr:
    return sympy.sympify(amount.flops) / FLOP_RATE + sympy.sympify(amount.bytes) / MEMORY_BANDWIDTH + amount.launches * LAUNCH_OVERHEAD


class _SymbolicLink(Link):
    """A link of symbols, which the field checks of ``Link`` would refuse."""

    def __post_init__(self) -> None:
        """Check nothing."""


def _message_time(message: Message, shape: StepShape) -> Size:
    """Return the alpha-beta time of a message on its link; a group along the batch grows with the symbol ``replicas``."""
    dimension = _dimension(message, shape)
    latency, bandwidth = sympy.symbols(f"latency_{dimension} bandwidth_{dimension}", positive=True)
    link = _SymbolicLink(latency, bandwidth)
    if message.kind == "send_receive":
        return communication.send_receive(message.bytes, link)
    n_ranks = REPLICAS * sympy.Rational(len(message.group), shape.n_replicas) if dimension in shape.replicated else len(message.group)
    return getattr(communication, message.kind)(message.bytes, n_ranks, link)


def _dimension(message: Message, shape: StepShape) -> str:
    return shape.dimension_of.get(tuple(sorted(message.group)), "pipeline")


def _memory(work: ProgramWork, shape: StepShape) -> sympy.Expr:
    """Return the bytes of a rank: parameters, gradients and optimizer state, and saved activations times microbatches in flight."""
    state = work.parameters + work.trained * (1 + shape.states)
    total = sympy.Integer(state)
    for stage, kept in work.kept.items():
        limit = shape.in_flight.get(stage)
        total += _collected(sympy.sympify(kept)) * (MICROBATCHES if limit is None else sympy.Min(MICROBATCHES, limit))
    return total


def _collected(expression: sympy.Expr) -> sympy.Expr:
    """Collect the terms of each symbol of the machine; their coefficients are polynomials in the rows where possible."""
    expanded = sympy.expand(expression)
    machine = [symbol for symbol in sorted(expanded.free_symbols, key=str) if symbol is not ROWS]
    return sympy.collect(expanded, [1 / symbol for symbol in machine] + machine)


def _meaning(name: str) -> str:
    if name in _MEANINGS:
        return _MEANINGS[name]
    quantity, _, dimension = name.partition("_")
    return f"{'s of' if quantity == 'latency' else 'B/s of'} the link along {dimension}"
