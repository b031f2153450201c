"""Assumptions of a trace: about the batch size, about a batch of one, and about random numbers.

- Guards: torch.export records assumptions about symbolic sizes in their shape environment, which is private: this file alone reads it.
- A batch of one: torch.export assumes that a symbolic size is at least two. If the model's own code compares such a size, and the result
  would differ for one, the graph computes one row as it does several, and a note says so.
- Random numbers: encoders of transformers drop layers in training, ``if torch.rand([]) < self.layerdrop``. A trace cannot branch on a
  value, but with ``layerdrop = 0.0`` the result is constant. The number is still drawn, so that later draws do not change.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from partitioner.tracing.inputs.flatten import BatchLayout
from passes.graph.symbolic_sizes import size_of

__all__ = ["Assumptions", "ConstantRandomComparisons", "assumptions_of", "record_comparisons_with_one", "symbol_of"]

_TESTED_SIZES = (*range(2, 130), *(2**power + offset for power in range(7, 21) for offset in (-1, 0, 1)))
"""Batch sizes that assumptions are tested with. torch.export assumes that a symbolic size is not 0 or 1."""


def symbol_of(program: ExportedProgram, leaf: int, dimension: int) -> sympy.Symbol | None:
    """Return the symbol of one size of an input; None if the trace made it static."""
    size = size_of(_size(program, leaf, dimension))
    return size if isinstance(size, sympy.Symbol) else None


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a trace about the sizes of its inputs.

    Attributes:
        batch: the symbol of the batch size.
        conditions: on symbols of sizes.
    """

    batch: sympy.Symbol
    conditions: tuple[sympy.Basic, ...]

    def largest_batch(self, sizes: Mapping[sympy.Symbol, int]) -> tuple[int | None, str]:
        """Return the largest batch size up to which all assumptions hold for given other sizes, and the one that fails for the next.

        None: they hold for every tested size, up to a million; 0: for none. PyTorch assumes what it cannot prove, even if it is true:
        ``min(6, 6 * batch) == 6`` holds because a batch is never empty.
        """
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        limit, failing = None, ""
        for expression in dict.fromkeys(_at(condition, numbers) for condition in self.conditions):
            found = _largest_that_holds(expression, self.batch)
            if found is not None and (limit is None or found < limit):
                limit, failing = found, _text(expression.xreplace({self.batch: sympy.Symbol("batch")}))
        return limit, failing

    def failing(self, names: Mapping[sympy.Symbol, str], sizes: Mapping[sympy.Symbol, int]) -> str:
        """Return the first assumption that fails for these sizes, whatever the batch; empty: there is none.

        Args:
            names: symbol -> what the text calls it.
            sizes: symbol -> number.
        """
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        for condition in self.conditions:
            if _at(condition, numbers) == sympy.false:
                return _text(condition.xreplace({symbol: sympy.Symbol(name) for symbol, name in names.items()}))
        return ""


def assumptions_of(program: ExportedProgram, layout: BatchLayout) -> Assumptions:
    """Return what a trace with an open batch size assumes of that and of all other open sizes."""
    size = _size(program, *layout.dimensions[0])
    assert isinstance(size, torch.SymInt)
    symbol, environment = size.node.expr, size.node.shape_env
    assumed = [guard.expr for guard in environment.guards]
    assumed += [deferred.expr for asserts in environment.deferred_runtime_asserts.values() for deferred in asserts]
    return Assumptions(symbol, tuple(dict.fromkeys(map(environment.replace, assumed))))


def _at(condition: sympy.Basic, numbers: Mapping[sympy.Symbol, sympy.Integer]) -> sympy.Basic:
    """Return a condition with numbers for symbols; false where it cannot be computed."""
    try:
        return condition.xreplace(numbers)
    except (ZeroDivisionError, AssertionError):  # torch has no remainder for a divisor of zero, or of a negative number
        return sympy.false


def _text(condition: sympy.Basic) -> str:
    """Return a condition as Python writes it: ``batch % 2 == 0``."""
    text = (
        f"{condition.lhs} {condition.rel_op} {condition.rhs}" if isinstance(condition, sympy.core.relational.Relational) else str(condition)
    )
    return re.sub(r"\bMod\((\w+), (\d+)\)", r"\1 % \2", text)


def _largest_that_holds(expression: sympy.Basic, symbol: sympy.Symbol) -> int | None:
    """Return the largest size up to which a condition on one symbol is true; None: any tested size; 0: it has other symbols."""
    if expression.free_symbols - {symbol}:
        return 0

    def holds(size: int) -> bool:
        return bool(_at(expression, {symbol: sympy.Integer(size)}) == sympy.true)

    failing = next((size for size in _TESTED_SIZES if not holds(size)), None)
    if failing is None:
        return None
    below = range(max((size for size in _TESTED_SIZES if size < failing), default=0) + 1, failing)
    return below.start - 1 + bisect.bisect_left(below, True, key=lambda size: not holds(size))


def _size(program: ExportedProgram, leaf: int, dimension: int) -> int | torch.SymInt:
    """Return the traced size of one dimension of a leaf of the inputs."""
    name = program.graph_signature.user_inputs[leaf]
    placeholder = next(node for node in program.graph.nodes if node.name == name)
    size: int | torch.SymInt = placeholder.meta["val"].shape[dimension]
    return size


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    f"__{compare.__name__}__": compare for compare in (operator.eq, operator.ge, operator.gt, operator.le, operator.lt, operator.ne)
}

_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def record_comparisons_with_one() -> Iterator[list[tuple[sympy.Symbol, str]]]:
    """While active, record comparisons of symbolic sizes whose results would differ for a size of one.

    Yields:
        A list that grows by their symbols and source lines, ``file.py:12``.
    """
    lines: list[tuple[sympy.Symbol, str]] = []
    originals = {name: getattr(torch.SymInt, name) for name in _COMPARISONS}

    def recording(name: str) -> Callable[[Any, Any], Any]:
        """Return a comparison operator that records lines of the model's code, not of torch, and then compares as the original."""

        def compare(self: torch.SymInt, other: Any) -> Any:
            frame = sys._getframe(1)  # noqa: SLF001  the line that compares; inspect.stack() would read source files
            if not frame.f_code.co_filename.startswith(_TORCH) and _differs_for_one(self, other, _COMPARISONS[name]):
                (symbol,) = self.node.expr.free_symbols
                line = symbol, f"{frame.f_code.co_filename}:{frame.f_lineno}"
                if line not in lines:
                    lines.append(line)
            return originals[name](self, other)

        return compare

    for name in _COMPARISONS:
        setattr(torch.SymInt, name, recording(name))
    try:
        yield lines
    finally:
        for name, original in originals.items():
            setattr(torch.SymInt, name, original)


def _differs_for_one(size: torch.SymInt, other: Any, compare: Callable[[Any, Any], Any]) -> bool:
    """Return whether comparing a symbolic size with an integer gives another result for a size of one than for a size of two."""
    expression = size.node.expr
    if not isinstance(other, int) or len(expression.free_symbols) != 1:
        return False
    (symbol,) = expression.free_symbols
    one, two = (compare(expression.xreplace({symbol: sympy.Integer(rows)}), other) for rows in (1, 2))
    return bool(one) != bool(two)


_RANDOM_COMPARISONS: Mapping[Any, Callable[[Any, Any], bool]] = {
    function: compare
    for compare in (operator.lt, operator.le, operator.gt, operator.ge)
    for function in (getattr(torch, compare.__name__), getattr(Tensor, compare.__name__), getattr(Tensor, f"__{compare.__name__}__"))
}

_LEAST, _LARGEST = 0.0, 1.0 - 2.0**-24
"""The least and the largest number that ``torch.rand`` draws."""


class ConstantRandomComparisons(TorchFunctionMode):
    """While active, comparing a scalar of ``torch.rand`` with a number gives a bool if all draws give the same one."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        constant = self._constant_result(func, args) if func in _RANDOM_COMPARISONS else None
        if constant is not None:
            return constant
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.ndim == 0:
            self._drawn.append(result)
        return result

    def _constant_result(self, func: Any, args: Any) -> bool | None:
        """Return the result of a comparison that is the same for all draws; None for any other call."""
        compare = _RANDOM_COMPARISONS.get(func) if len(args) == 2 else None
        if compare is None or not isinstance(args[1], int | float) or not any(args[0] is drawn for drawn in self._drawn):
            return None
        answers = {compare(_LEAST, args[1]), compare(_LARGEST, args[1])}
        return answers.pop() if len(answers) == 1 else None
