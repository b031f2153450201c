"""Operations that look elements up by index, or write them there: tables, gathers, scatters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from passes.rules.bind import MisfitError, numbered, rank_and_dimension, whole, write
from passes.rules.call import Call, Operand

__all__ = ["bincount", "everything", "gather", "histogram", "index", "index_put", "index_rows", "index_select", "scatter", "take_along"]


def index_select(call: Call) -> str:
    """Rows of a dimension, in the order of the index."""
    rank, chosen = rank_and_dimension(call)
    after = numbered(rank)
    after[chosen] = "picks"
    return write([numbered(rank, {chosen: "!"}), ["picks?"]], [after], "linear self")


def index_rows(*, added: bool) -> Callable[[Call], str]:
    """Rows of a second operand are written, or added, where the index says."""

    def rule(call: Call) -> str:
        rank, chosen = rank_and_dimension(call)
        own, rows = numbered(rank, {chosen: "!"}), numbered(rank)
        mark = "" if added else "!"
        rows[chosen] = f"picks{mark}"
        first = ["+", *own] if added else own
        source = rows if call.operand("source").shape else []
        return write([first, [f"picks{mark}?"], source], [own], "linear source" if added else "linear self source")

    return rule


def gather(call: Call) -> str:
    """Each element of the result is looked up in its own row. An index may have fewer rows than the operand: these are not cut."""
    source, picks = call.operand("self"), call.operand("index")
    rank, chosen = rank_and_dimension(call)
    before, after = numbered(rank, {chosen: "!"}), numbered(rank)
    if after:
        after[chosen] = "picks"
    _mark_unequal(chosen, source, picks, before, after)
    return write([before, after], [after], "linear self")


def _mark_unequal(chosen: int, source: Operand, picks: Operand, before: list[str], after: list[str]) -> None:
    if len(picks.shape) != len(source.shape):
        raise MisfitError("the index has other dimensions")
    for place in range(len(source.shape)):
        if place != chosen and source.shape[place] != picks.shape[place]:
            before[place], after[place] = f"dim{place}!", f"dim{place}'!"


def take_along(call: Call) -> str:
    """``gather`` with broadcasting, or in the flattened operand."""
    source, picks = call.operand("self"), call.operand("indices")
    if call["dim"] is None:
        return write([whole(len(source.shape)), whole(len(picks.shape), name="picks")], [["found!"]])
    rank, chosen = rank_and_dimension(call)
    before, after = numbered(rank, {chosen: "!"}), numbered(rank)
    after[chosen] = "picks"
    return write([before, after], [after], "linear self")


def scatter(call: Call) -> str:
    """Elements are written into their own row, or added: contributions from parts of the index can be summed."""
    own, picks = call.operand("self"), call.operand("index")
    rank, chosen = rank_and_dimension(call)
    adds = call.operator.overloadpacket is torch.ops.aten.scatter_add
    before, rows = numbered(rank, {chosen: "!"}), numbered(rank)
    if rows:
        rows[chosen] = "picks" if adds else "picks!"
    _mark_unequal(chosen, own, picks, before, rows)
    written = list(rows)
    source = call.get("src")
    if isinstance(source, Operand):
        for place in range(rank):
            if source.shape[place] != picks.shape[place]:
                name = "picks" if place == chosen else f"dim{place}"
                rows[place], written[place] = f"{name}''!", f"{name}'''!"
                before[place] = f"{name}!" if place != chosen else before[place]
    reduces = call.get("reduce") is not None
    clauses = [] if reduces else ["linear src"] if adds else ["linear self src value"]
    return write([["+", *before] if adds else before, rows, written], [before], *clauses)


def index(call: Call) -> str:
    """Advanced indexing: dimensions of the indices, broadcast together, stand where the indexed dimensions stood."""
    own, picked, indices, _ = _indexed(call)
    return write([own, *indices], [picked], "linear self")


def index_put(call: Call) -> str:
    """Values are written where advanced indexing would read, or added: then contributions from parts of the indices can be summed."""
    own, picked, indices, counted = _indexed(call)
    adds = bool(call["accumulate"]) and counted
    if not adds:
        indices = _index_terms(call, "!")
    values = picked[len(picked) - len(call.operand("values").shape) :]
    return write([["+", *own] if adds else own, *indices, values], [own], "linear values" if adds else "linear self values")


def _indices(call: Call) -> list[Operand | None]:
    return [each if isinstance(each, Operand) else None for each in call["indices"]]


def _is_mask(operand: Operand) -> bool:
    return operand.dtype in (torch.bool, torch.uint8)


def _index_terms(call: Call, mark: str) -> list[list[str]]:
    """A term for each index: dimensions of indices are aligned at their right ends. A mask is read whole."""
    terms = []
    for number, operand in enumerate(each for each in _indices(call) if each is not None):
        rank = len(operand.shape)
        if _is_mask(operand):
            terms.append(whole(rank, name=f"mask{number}_"))
        else:
            terms.append([f"picks{rank - 1 - place}{mark}" for place in range(rank)])
    return terms


def _indexed(call: Call) -> tuple[list[str], list[str], Sequence[list[str]], bool]:
    """Terms of the operand, of what is picked from it, and of the indices; whether no index is a mask."""
    indices = _indices(call)
    masks = [operand for operand in indices if operand is not None and _is_mask(operand)]
    own: list[str] = []
    places: list[int | None] = []
    for operand in indices:
        covered = len(operand.shape) if operand is not None and _is_mask(operand) else 1
        for _ in range(covered):
            own.append(f"dim{len(own)}{'!' if operand is not None else ''}")
        places.append(None if operand is None else len(own) - covered)
    own += [f"dim{place}" for place in range(len(own), len(call.operand("self").shape))]
    used = [number for number, operand in enumerate(indices) if operand is not None]
    ranks = [1 if _is_mask(operand) else len(operand.shape) for operand in indices if operand is not None]
    width = max(ranks, default=0)
    picks = [f"picks{width - 1 - place}{'!' if masks else ''}" for place in range(width)]
    adjacent = used == list(range(used[0], used[-1] + 1)) if used else True
    start = places[used[0]] if used and adjacent else 0
    assert start is not None
    kept = [(place, name) for place, name in enumerate(own) if not name.endswith("!")]
    front = [name for place, name in kept if place < start]
    behind = [name for place, name in kept if place >= start]
    return own, [*front, *picks, *behind], _index_terms(call, "!" if masks else ""), not masks


# -- operations that make tensors, or count ----------------------------------------------------------------------------------------


def histogram(call: Call) -> str:
    """Counts between fixed bounds are summed over parts; bounds that are read from the values need all of them."""
    rank = len(call.operand("self").shape)
    fixed = call.get("min", 0) != call.get("max", 0)
    return write([numbered(rank) if fixed else whole(rank)], [["bins!"]])


def bincount(call: Call) -> str:
    """How many bins there are follows from the values."""
    return write([["counted!"], ["counted!"]], [["bins!"]], *([] if call.get("weights") is None else ["linear weights"]))


def everything(call: Call) -> str:
    """Each result needs every element of every operand: nothing is cut."""
    if not call.operands:
        raise MisfitError("there is no operand")
    operands = [[] if slot is None else whole(len(slot.shape), name=f"operand{slot.index}_") for slot in call.slots]
    return write(operands, [whole(len(shape), name=f"result{index}_") for index, shape in enumerate(call.results)])
