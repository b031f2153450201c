"""Notice where a model asks whether its batch is of one row.

A trace takes for granted that an open size is two or more. Where the model's own code compares such a size and one row would have given
another answer, the graph computes one row as it does several, and the user is told.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sympy
import torch

__all__ = ["questions_about_one_row"]

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "__eq__": operator.eq,
    "__ge__": operator.ge,
    "__gt__": operator.gt,
    "__le__": operator.le,
    "__lt__": operator.lt,
    "__ne__": operator.ne,
}

_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def questions_about_one_row() -> Iterator[list[str]]:
    """Watch comparisons of open sizes while active.

    Yields:
        A list that grows by the source lines, ``file.py:12``, whose answers for one row would differ.
    """
    found: list[str] = []
    originals = {name: getattr(torch.SymInt, name) for name in _COMPARISONS}

    def watch(name: str) -> Callable[[Any, Any], Any]:
        def compare(self: torch.SymInt, other: Any) -> Any:
            frame = sys._getframe(1)  # noqa: SLF001  the line that compares; inspect.stack() would read source files
            if not frame.f_code.co_filename.startswith(_TORCH) and _tells_one_from_two(self, other, _COMPARISONS[name]):
                line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                if line not in found:
                    found.append(line)
            return originals[name](self, other)

        return compare

    for name in _COMPARISONS:
        setattr(torch.SymInt, name, watch(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(torch.SymInt, name, original)


def _tells_one_from_two(size: torch.SymInt, other: Any, compare: Callable[[Any, Any], Any]) -> bool:
    expression = size.node.expr
    if not isinstance(other, int) or len(expression.free_symbols) != 1:
        return False
    (symbol,) = expression.free_symbols
    one, two = (compare(expression.xreplace({symbol: sympy.Integer(rows)}), other) for rows in (1, 2))
    return bool(one) != bool(two)
