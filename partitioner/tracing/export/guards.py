"""Assumptions of a trace: about the batch size, and about a batch of one.

- Guards: torch.export records assumptions about symbolic sizes in their shape environment, which is private: this file alone reads it.
- A batch of one: torch.export assumes that a symbolic size is at least two. If the model's own code compares such a size, and the result
  would differ for one, the graph computes one row as it does several, and a note says so.
"""

from __future__ import annotations

import bisect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch.export import ExportedProgram

from partitioner.tracing.inputs.flatten import BatchLayout
from passes.graph.symbolic_sizes import size_of

_TESTED_SIZES = (*range(2, 130), *(2**power + offset for power in range(7, 21) for offset in (-1, 0, 1)))
"""Batch sizes that assumptions are tested with. torch.export assumes that a symbolic size is not 0 or 1."""


def symbol_of(program: ExportedProgram, leaf: int, dimension: int) -> sympy.Symbol | None:
    """Return the symbol of one size of an input; None if the trace made it static."""
    size = expression_of(program, leaf, dimension)
    return size if isinstance(size, sympy.Symbol) else None


def expression_of(program: ExportedProgram, leaf: int, dimension: int) -> int | sympy.Expr:
    """Return one size of an input, an expression in symbols if the trace left it open."""
    return size_of(_size(program, leaf, dimension))


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a trace about the sizes of its inputs.

    Attributes:
        batch: the symbol of the batch size.
        conditions: on symbols of sizes.
        differs_for_one: whether lines of the model decide otherwise for a batch of one row.
    """

    batch: sympy.Symbol
    conditions: tuple[sympy.Basic, ...]
    differs_for_one: bool = False

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

    def hold_for(self, rows: int) -> bool:
        """Return whether all assumptions hold for a batch of so many rows, where no other size is open."""
        if rows == 1:
            return not self.differs_for_one
        return all(_at(condition, {self.batch: sympy.Integer(rows)}) == sympy.true for condition in self.conditions)

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


def assumptions_of(program: ExportedProgram, layout: BatchLayout, *, differs_for_one: bool) -> Assumptions:
    """Return the assumptions of a trace about its open sizes, the batch size among them."""
    size = _size(program, *layout.dimensions[0])
    assert isinstance(size, torch.SymInt)
    symbol, environment = size.node.expr, size.node.shape_env
    assumed = [guard.expr for guard in environment.guards]
    assumed += [deferred.expr for asserts in environment.deferred_runtime_asserts.values() for deferred in asserts]
    return Assumptions(symbol, tuple(dict.fromkeys(map(environment.replace, assumed))), differs_for_one)


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


def bool_of_condition(original: Callable[[torch.SymBool], bool], lines: list[tuple[sympy.Symbol, str]]) -> Callable[[torch.SymBool], bool]:
    """Return ``SymBool.__bool__`` that notes conditions of the model's own code whose results would differ for a size of one.

    Args:
        lines: gets the symbol of the size and the source line, ``file.py:12``.
    """

    def is_true(condition: torch.SymBool) -> bool:
        frame = sys._getframe(2)  # noqa: SLF001  the line that asks; inspect.stack() would read source files
        if not str(frame.f_globals.get("__name__", "")).startswith(_NOT_THE_MODEL) and _differs_for_one(condition.node.expr):
            (symbol,) = condition.node.expr.free_symbols
            line = symbol, f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if line not in lines:
                lines.append(line)
        return original(condition)

    return is_true


_NOT_THE_MODEL = ("torch.", "partitioner.", "passes.")


def _differs_for_one(condition: sympy.Basic) -> bool:
    """Return whether a condition on one size is another one for a size of one than for a size of two."""
    if len(condition.free_symbols) != 1:
        return False
    (symbol,) = condition.free_symbols
    one, two = (condition.xreplace({symbol: sympy.Integer(rows)}) for rows in (1, 2))
    return bool(one != two)
