"""Operations that make tensors, or count: what depends on positions cannot be cut."""

from __future__ import annotations

from passes.rules.bind import MisfitError
from passes.rules.call import Call
from passes.rules.writing import numbered, write

__all__ = ["bincount", "everything", "histogram"]


def histogram(call: Call) -> str:
    """Counts between fixed bounds are summed over parts; bounds that are read from the values need all of them."""
    rank = len(call.operand("self").shape)
    fixed = call.get("min", 0) != call.get("max", 0)
    return write([numbered(rank, None if fixed else dict.fromkeys(range(rank), "!"))], [["bins!"]])


def bincount(call: Call) -> str:
    """How many bins there are follows from the values."""
    return write([["counted!"], ["counted!"]], [["bins!"]], *([] if call.get("weights") is None else ["linear weights"]))


def everything(call: Call) -> str:
    """Each result needs every element of every operand: nothing is cut."""
    if not call.operands:
        raise MisfitError("there is no operand")
    terms = [
        numbered(len(operand.shape), dict.fromkeys(range(len(operand.shape)), "!"), name=f"operand{operand.index}_")
        for operand in call.operands
    ]
    results = [
        numbered(len(shape), dict.fromkeys(range(len(shape)), "!"), name=f"result{index}_") for index, shape in enumerate(call.results)
    ]
    slots = iter(terms)
    return write([next(slots) if slot is not None else [] for slot in call.slots], results)
