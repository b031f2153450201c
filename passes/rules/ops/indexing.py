"""Rules of ops that read or write elements at indices (gather, scatter, advanced indexing), and of ops that count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from passes.rules.bind import MisfitError, numbered, rank_and_dimension, whole, write
from passes.rules.call import Call, Operand


def index_select(call: Call) -> str:
    """Pick elements of a dimension, in the order of the index: ``dim0! dim1, picks -> picks dim1``."""
    rank, dim = rank_and_dimension(call)
    after = numbered(rank)
    after[dim] = "picks"
    return write([numbered(rank, {dim: "!"}), ["picks?"]], [after], "linear self")


def index_rows(*, added: bool) -> Callable[[Call], str]:
    """Return the rule of ``index_add`` (``added``) or of ``index_copy``, which overwrites, so that its index cannot be sharded."""

    def rule(call: Call) -> str:
        rank, dim = rank_and_dimension(call)
        operand, source = numbered(rank, {dim: "!"}), numbered(rank)
        mark = "" if added else "!"
        source[dim] = f"picks{mark}"
        if not call.operand("source").shape:
            source = []
        first = ["+", *operand] if added else operand
        return write([first, [f"picks{mark}?"], source], [operand], "linear source" if added else "linear self source")

    return rule


def gather(call: Call) -> str:
    """Read elements of a dimension at indices: ``dim0! dim1, picks dim1 -> picks dim1``."""
    rank, dim = rank_and_dimension(call)
    operand, picks = numbered(rank, {dim: "!"}), numbered(rank)
    if picks:
        picks[dim] = "picks"
    _mark_unequal_sizes(dim, call.operand("self"), call.operand("index"), operand, picks)
    return write([operand, picks], [picks], "linear self")


def _mark_unequal_sizes(dim: int, operand: Operand, indices: Operand, operand_term: list[str], index_term: list[str]) -> None:
    """Mark dimensions other than ``dim`` in which the index is smaller than the operand as not cut, in place."""
    if len(indices.shape) != len(operand.shape):
        raise MisfitError("the index has other dimensions")
    for other in range(len(operand.shape)):
        if other != dim and operand.shape[other] != indices.shape[other]:
            operand_term[other], index_term[other] = f"dim{other}!", f"dim{other}'!"


def take_along(call: Call) -> str:
    """Gather with broadcasting; without a dimension from the flattened operand, and nothing is cut."""
    if call["dim"] is None:
        operands = [whole(len(call.operand("self").shape)), whole(len(call.operand("indices").shape), name="picks")]
        return write(operands, [["found!"]])
    rank, dim = rank_and_dimension(call)
    operand, picks = numbered(rank, {dim: "!"}), numbered(rank)
    picks[dim] = "picks"
    return write([operand, picks], [picks], "linear self")


def scatter(call: Call) -> str:
    """Write elements of a dimension at indices; added elements let indices be cut, and the results of parts are summed."""
    indices, source = call.operand("index"), call.get("src")
    rank, dim = rank_and_dimension(call)
    adds = call.operator.overloadpacket is torch.ops.aten.scatter_add
    operand_term, index_term = numbered(rank, {dim: "!"}), numbered(rank)
    if index_term:
        index_term[dim] = "picks" if adds else "picks!"
    _mark_unequal_sizes(dim, call.operand("self"), indices, operand_term, index_term)
    source_term = list(index_term)
    if isinstance(source, Operand):
        for axis in range(rank):
            if source.shape[axis] != indices.shape[axis]:  # an index smaller than the source is not cut
                name = "picks" if axis == dim else f"dim{axis}"
                index_term[axis], source_term[axis] = f"{name}''!", f"{name}'''!"
                if axis != dim:
                    operand_term[axis] = f"{name}!"
    linear = ["linear src" if adds else "linear self src value"] if call.get("reduce") is None else []
    return write([["+", *operand_term] if adds else operand_term, index_term, source_term], [operand_term], *linear)


def index(call: Call) -> str:
    """Advanced indexing: dimensions of the indices, broadcast together, replace the indexed dimensions."""
    operand, result, indices, _ = _advanced_indexing_terms(call)
    return write([operand, *indices], [result], "linear self")


def index_put(call: Call) -> str:
    """Write values at advanced indices; added values let indices be cut, and the results of parts are summed."""
    operand, indexed, indices, no_masks = _advanced_indexing_terms(call)
    adds = bool(call["accumulate"]) and no_masks
    if not adds:
        indices = _index_terms(call, "!")
    values = indexed[len(indexed) - len(call.operand("values").shape) :]
    first = ["+", *operand] if adds else operand
    return write([first, *indices, values], [operand], "linear values" if adds else "linear self values")


def _indices(call: Call) -> list[Operand | None]:
    """Return the index tensor of each indexed dimension (a mask is one of several); None for ``:``."""
    return [index if isinstance(index, Operand) else None for index in call["indices"]]


def _is_mask(operand: Operand) -> bool:
    return operand.dtype in (torch.bool, torch.uint8)


def _index_terms(call: Call, mark: str) -> list[list[str]]:
    """Return a term for each index tensor, with dimensions aligned at their right ends. A mask is not cut."""
    terms = []
    for number, operand in enumerate(index for index in _indices(call) if index is not None):
        rank = len(operand.shape)
        if _is_mask(operand):
            terms.append(whole(rank, name=f"mask{number}_"))
        else:
            terms.append([f"picks{rank - 1 - place}{mark}" for place in range(rank)])
    return terms


def _advanced_indexing_terms(call: Call) -> tuple[list[str], list[str], Sequence[list[str]], bool]:
    """Return the terms of ``x[indices]``: of ``x``, of the result, and of each index; and whether no index is a mask.

    x[:, i, j]    x "dim0 dim1! dim2! dim3"    result "dim0 picks0 dim3"    i "picks0"    j "picks0"
    x[i, :, j]    x "dim0! dim1 dim2! dim3"    result "picks0 dim1 dim3": not adjacent, so that PyTorch puts the indices in front
    """
    indices = _indices(call)
    operand_term: list[str] = []
    starts: list[int] = []  # the first dimension of x that each index takes
    for index in indices:
        n_dims = len(index.shape) if index is not None and _is_mask(index) else 1
        starts.append(len(operand_term))
        operand_term += [f"dim{starts[-1] + offset}{'!' if index is not None else ''}" for offset in range(n_dims)]
    operand_term += [f"dim{place}" for place in range(len(operand_term), len(call.operand("self").shape))]
    used = [number for number, index in enumerate(indices) if index is not None]
    has_mask = any(index is not None and _is_mask(index) for index in indices)
    ranks = [1 if _is_mask(index) else len(index.shape) for index in indices if index is not None]
    rank, mark = max(ranks, default=0), "!" if has_mask else ""
    picks = [f"picks{rank - 1 - place}{mark}" for place in range(rank)]
    adjacent = bool(used) and used == list(range(used[0], used[-1] + 1))
    start = starts[used[0]] if adjacent else 0
    before = [name for name in operand_term[:start] if not name.endswith("!")]
    after = [name for name in operand_term[start:] if not name.endswith("!")]
    return operand_term, [*before, *picks, *after], _index_terms(call, mark), not has_mask


# -- operations that make tensors, or count ----------------------------------------------------------------------------------------


def histogram(call: Call) -> str:
    """Count values; with fixed bounds the operand may be cut and counts are summed, other bounds need all of it."""
    rank = len(call.operand("self").shape)
    fixed = call.get("min", 0) != call.get("max", 0)
    return write([numbered(rank) if fixed else whole(rank)], [["bins!"]])


def bincount(call: Call) -> str:
    """Count values; the number of bins depends on them, so nothing is cut."""
    return write([["counted!"], ["counted!"]], [["bins!"]], *([] if call.get("weights") is None else ["linear weights"]))


def all_whole(call: Call) -> str:
    """Cut nothing: each result needs all elements of all operands."""
    if not call.operands:
        raise MisfitError("there is no operand")
    operands = [[] if slot is None else whole(len(slot.shape), name=f"operand{slot.index}_") for slot in call.slots]
    return write(operands, [whole(len(shape), name=f"result{index}_") for index, shape in enumerate(call.results)])
