"""What a trace assumed about the batch size.

A trace that may assume something keeps it in the shape environment of its symbolic sizes, which is no public API:
this file alone reads it.
"""

from __future__ import annotations

import sympy
import torch
from torch.export import ExportedProgram

from partitioner.tracing.inputs import BatchLayout
from passes.size_expression import size_of

__all__ = ["assumptions_always_hold", "symbol_of"]

_TRIED = (*range(2, 130), *(2**power + offset for power in range(7, 21) for offset in (-1, 0, 1)))
"""Batch sizes that assumptions are tried with. A trace takes for granted that a size is no 0 or 1."""


def symbol_of(program: ExportedProgram, leaf: int, dimension: int) -> sympy.Symbol | None:
    """The symbol of one size of an input; None when it was made static."""
    size = size_of(_size(program, leaf, dimension))
    return size if isinstance(size, sympy.Symbol) else None


def assumptions_always_hold(program: ExportedProgram, layout: BatchLayout) -> bool:
    """Whether everything that a trace assumed is true for every batch size tried, up to a million.

    PyTorch cannot prove all that is: ``min(6, 6 * batch) == 6`` counts as an assumption, though a batch is never empty.
    """
    size = _size(program, *layout.dimensions[0])
    assert isinstance(size, torch.SymInt)
    symbol, environment = size.node.expr, size.node.shape_env
    assumed = [guard.expr for guard in environment.guards]
    assumed += [deferred.expr for several in environment.deferred_runtime_asserts.values() for deferred in several]
    return all(_always_holds(expression.xreplace(environment.replacements), symbol) for expression in assumed)


def _always_holds(expression: sympy.Basic, symbol: sympy.Symbol) -> bool:
    if expression.free_symbols - {symbol}:
        return False
    return all(expression.xreplace({symbol: sympy.Integer(size)}) == sympy.true for size in _TRIED)


def _size(program: ExportedProgram, leaf: int, dimension: int) -> int | torch.SymInt:
    name = program.graph_signature.user_inputs[leaf]
    placeholder = next(node for node in program.graph.nodes if node.name == name)
    size: int | torch.SymInt = placeholder.meta["val"].shape[dimension]
    return size
