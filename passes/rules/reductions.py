"""Operations along dimensions: reductions, scans, softmax, sorts."""

from __future__ import annotations

from collections.abc import Callable

from passes.rules.bind import MisfitError
from passes.rules.call import Call
from passes.rules.loops import Reduction
from passes.rules.writing import dimension, dimensions, numbered, write

__all__ = ["along", "compared", "difference", "glu", "reduced", "selected_along", "transformed"]


def reduced(by: Reduction, *clauses: str) -> Callable[[Call], str]:
    """The named dimensions leave, or all of them.

    Args:
        by: how the results of parts are combined.
        clauses: of the line.
    """

    def rule(call: Call) -> str:
        source = call.operand("self", "input", "x")
        leaving = set(dimensions(source, call.get("dim")))
        mark = "!" if by == "whole" else f":{by}"
        before = numbered(len(source.shape), dict.fromkeys(leaving, mark))
        keep = call.get("keepdim", False)
        after = [name if index not in leaving else "1" for index, name in enumerate(before) if keep or index not in leaving]
        return write([before], [after], *clauses)

    return rule


def along(name: str = "dim", *clauses: str) -> Callable[[Call], str]:
    """The result has the dimensions of the operand, and each element needs all of one of them."""

    def rule(call: Call) -> str:
        source = call.operand("self", "input")
        given = call.get(name)
        if given is None:
            raise MisfitError(f"no {name} is named")
        rank = len(source.shape)
        both = numbered(rank, {dimension(rank, given): "!"})
        return write([both], [both], *clauses)

    return rule


def selected_along(call: Call) -> str:
    """Some elements of a dimension, in an order of their own: ``topk``, ``kthvalue``."""
    rank = len(call.operand("self").shape)
    chosen = dimension(rank, call["dim"])
    before, after = numbered(rank, {chosen: "!"}), numbered(rank, {chosen: "'!"})
    if len(call.results[0]) == rank:
        return write([before], [after])
    return write([before], [[name for index, name in enumerate(after) if index != chosen]])


def difference(call: Call) -> str:
    """Differences of neighbours; what is put in front or behind has a size of its own."""
    rank = len(call.operand("self").shape)
    chosen = dimension(rank, call["dim"])
    own, result, front, behind = (numbered(rank, {chosen: f"{chr(39) * primes}!"}) for primes in range(4))
    return write([own, front, behind], [result], "linear self prepend append")


def transformed(call: Call) -> str:
    """Fourier transforms: the size of a transformed dimension may change. All dimensions when none is named."""
    source = call.operand("self")
    chosen = dimensions(source, call["dim"])
    before, after = (numbered(len(source.shape), dict.fromkeys(chosen, mark)) for mark in ("!", "'!"))
    return write([before], [after], "linear self")


def compared(call: Call) -> str:
    """Two broadcast operands are compared along one dimension, the last when none is named."""
    ranks = [len(operand.shape) for operand in call.operands]
    chosen = dimension(max(ranks), call.get("dim", -1))
    names = numbered(max(ranks), {chosen: "!"})
    after = [name if index != chosen else "1" for index, name in enumerate(names) if index != chosen or call.get("keepdim", False)]
    return write([names[max(ranks) - rank :] for rank in ranks], [after])


def glu(call: Call) -> str:
    """Two halves of a dimension, one gates the other."""
    rank = len(call.operand("self").shape)
    chosen = dimension(rank, call["dim"])
    before, after = numbered(rank), numbered(rank)
    before[chosen] = f"(half! dim{chosen})"
    return write([before], [after])
