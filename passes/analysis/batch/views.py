"""Operations that move, select, repeat or join elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from passes.analysis.batch.call import Call, Shape
from passes.analysis.batch.role import Role, RowNumbers, Rows, Same

__all__ = [
    "broadcast", "cat", "expand", "flipped", "move", "narrow", "new_last", "padded", "permute", "positions", "repeat", "repeat_interleave",
    "reshape", "same_dimensions", "select", "select_scatter", "slice_", "split", "squeeze", "stack", "swap", "take", "unbind",
    "unchanged", "unfold", "unsqueeze",
]  # fmt: skip


def reshape(call: Call) -> Role:
    """Elements keep their order: the batch stays where it is in the flattened index."""
    source = call["self"]
    role, before, after = call.role(source), call.shapes[source], call.results[0]
    if isinstance(role, Same):
        return role
    if not isinstance(role, Rows | RowNumbers):
        return call.mixed
    blocks = _product(before[: role.dimension]) * (role.before if isinstance(role, Rows) else 1)
    target = _dimension_of_batch(call, after)
    if target is None:
        return call.mixed
    if 0 in before:  # no elements, in any order
        return Rows(target) if after[target] == call.batch else call.mixed
    outer = _product(after[:target])
    if call.depends_on_batch(outer) or call.depends_on_batch(blocks) or blocks % outer:
        return call.mixed
    inside, multiple = int(blocks // outer), after[target] / call.batch
    if not multiple.is_Integer or int(multiple) % inside:
        return call.mixed
    if isinstance(role, RowNumbers):
        return RowNumbers(target) if multiple == 1 else call.mixed
    return Rows(target, inside)


def _product(sizes: Sequence[Any]) -> Any:
    return math.prod(sizes, start=1)


def _dimension_of_batch(call: Call, shape: Shape) -> int | None:
    found = [index for index, size in enumerate(shape) if call.depends_on_batch(size)]
    return found[0] if len(found) == 1 else None


def _moved(call: Call, source: fx.Node, dimensions: Sequence[int | None]) -> Role:
    """Dimensions of one operand go to dimensions of the result; row numbers go with them, other operands do not matter."""
    role = call.role(source)
    if isinstance(role, Same):
        return role
    target = dimensions[role.dimension] if isinstance(role, Rows | RowNumbers) else None
    if target is None:
        return call.mixed
    return RowNumbers(target) if isinstance(role, RowNumbers) else Rows(target, role.before)  # type: ignore[union-attr]


def permute(call: Call) -> Role:
    """Dimensions in another order."""
    source = call["self"]
    order = [call.dimension(source, dimension) for dimension in call["dims"]]
    return _moved(call, source, [order.index(index) for index in range(len(order))])


def move(call: Call) -> Role:
    """``movedim``: some dimensions go to new places, the others keep their order."""
    source = call["self"]
    rank = call.rank(source)
    going = dict(zip(*([int(dim) % rank for dim in _list(call[name])] for name in ("destination", "source")), strict=True))
    staying = iter(dimension for dimension in range(rank) if dimension not in going.values())
    order = [going[place] if place in going else next(staying) for place in range(rank)]
    return _moved(call, source, [order.index(index) for index in range(rank)])


def unchanged(call: Call) -> Role:
    """Each element of the first operand, perhaps in another type or in memory of its own."""
    return call.role(call["self"])


def new_last(call: Call) -> Role:
    """Each element becomes a vector (``one_hot``)."""
    return call.aligned({call["self"]: call.leading(call["self"], 0)})


def swap(first: str | int, second: str | int) -> Callable[[Call], Role]:
    """Two dimensions change places; given by argument name or position."""

    def rule(call: Call) -> Role:
        source = call["self"]
        rank = call.rank(source)
        order = list(range(rank))
        if rank > 1:
            one, other = (call.dimension(source, call[which] if isinstance(which, str) else which) for which in (first, second))
            order[one], order[other] = order[other], order[one]
        return _moved(call, source, order)

    return rule


def unsqueeze(call: Call) -> Role:
    """A new dimension of one."""
    source = call["self"]
    new = int(call["dim"]) % (call.rank(source) + 1)
    return _moved(call, source, [index + (index >= new) for index in range(call.rank(source))])


def squeeze(call: Call) -> Role:
    """Dimensions of one leave; the batch stays, whatever its size."""
    source = call["self"]
    shape = call.shapes[source]
    given = call.get("dim")
    chosen = range(len(shape)) if given is None else [call.dimension(source, dim) for dim in _list(given)]
    left = {index for index in chosen if shape[index] == 1}
    return _moved(call, source, _without(len(shape), left))


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _without(rank: int, left: set[int]) -> list[int | None]:
    return [None if index in left else index - sum(other < index for other in left) for index in range(rank)]


def expand(call: Call) -> Role:
    """Dimensions of one are repeated; where a value that every microbatch has is repeated for each row, it becomes rows."""
    source = call.operands[0]
    if isinstance(call.role(source), Same):
        target = _dimension_of_batch(call, call.results[0])
        return Same() if target is None else Rows(target)
    return _moved(call, source, call.from_the_right(source))


def broadcast(call: Call) -> tuple[Role, ...]:
    """Several tensors, expanded to one shape."""
    rank = len(call.results[0])
    return tuple(_moved(call, tensor, call.from_the_right(tensor, rank)) for tensor in call["tensors"])


def repeat(call: Call) -> Role:
    """Blocks are repeated: repeating the batch puts it behind the number of the copy."""
    source = call["self"]
    if isinstance(call.role(source), Same):
        return expand(call)
    role = call.aligned({source: call.from_the_right(source)})
    if not isinstance(role, Rows):
        return role
    copies = call["repeats"][role.dimension]
    return Rows(role.dimension, role.before * copies) if isinstance(copies, int) and copies > 0 else call.mixed


def repeat_interleave(call: Call) -> Role:
    """Each element is repeated behind itself."""
    source, dimension = call["self"], call["dim"]
    if not isinstance(call["repeats"], int) or (dimension is None and call.rank(source) != 1):
        return call.mixed
    return call.aligned({source: call.leading(source, 0)})


def select(call: Call) -> Role:
    """One element of a dimension."""
    source = call["self"]
    if call.depends_on_batch(call["index"]):
        return call.mixed
    return call.aligned({source: _without(call.rank(source), {call.dimension(source, call["dim"])})})


def select_scatter(call: Call) -> Role:
    """One element of a dimension is written."""
    source, written, dim = call["self"], call["src"], call.dimension(call["self"], call["dim"])
    rank = call.rank(source)
    whole: list[int | None] = [None if index == dim else index for index in range(rank)]
    return call.aligned({written: [index for index in range(rank) if index != dim], source: whole})


def slice_(call: Call) -> Role:
    """Part of a dimension, or all of it."""
    source = call["self"]
    if call["start"] in (None, 0) and call["step"] == 1 and call["end"] == call.shapes[source][call.dimension(source, call["dim"])]:
        return call.role(source)
    if call.depends_on_batch([call["start"], call["end"], call["step"]]):
        return call.mixed
    return _along_dim(call)


def narrow(call: Call) -> Role:
    """Part of a dimension, from a start and of a length."""
    if call.depends_on_batch([call["start"], call["length"]]):
        return call.mixed
    return _along_dim(call)


def same_dimensions(*names: str) -> Callable[[Call], Role]:
    """Operands and result have the same dimensions; those that the arguments name are needed whole."""

    def rule(call: Call) -> Role:
        dimensions: dict[fx.Node, list[int | None]] = {}
        for operand in call.operands:
            if call.rank(operand) != len(call.results[0]):
                return call.mixed
            consumed = {call.dimension(operand, dim) for name in names for dim in _list(call[name])}
            dimensions[operand] = [None if index in consumed else index for index in range(call.rank(operand))]
        return call.aligned(dimensions)

    return rule


_along_dim = same_dimensions("dim")


def split(call: Call) -> Role:
    """Parts of a dimension, each with the role of the whole."""
    source = call["self"]
    if any(call.depends_on_batch(call.get(name)) for name in ("split_size", "split_sizes", "chunks", "sections", "indices")):
        return call.mixed
    dimension = call.dimension(source, call["dim"])
    return call.aligned({source: [None if index == dimension else index for index in range(call.rank(source))]})


def unbind(call: Call) -> Role:
    """Every element of a dimension."""
    source = call["self"]
    return call.aligned({source: _without(call.rank(source), {call.dimension(source, call["dim"])})})


def cat(call: Call) -> Role:
    """Joined along a dimension; tensors of one empty dimension do not count."""
    tensors = [tensor for tensor in call["tensors"] if call.shapes[tensor] != (0,)]
    if not tensors:
        return Same()
    consumed = call.dimension(tensors[0], call["dim"])
    return call.aligned({tensor: [None if index == consumed else index for index in range(call.rank(tensor))] for tensor in tensors})


def stack(call: Call) -> Role:
    """Joined along a new dimension."""
    tensors = call["tensors"]
    new = int(call["dim"]) % len(call.results[0])
    return call.aligned({tensor: [index + (index >= new) for index in range(call.rank(tensor))] for tensor in tensors})


def flipped(call: Call) -> Role:
    """Elements change places along dimensions (all of them, flattened, when none is named)."""
    dims = call["dims"]
    return same_dimensions("dims")(call) if _list(dims) else call.mixed


def padded(call: Call) -> Role:
    """The last dimensions grow or shrink where the padding is not zero."""
    source, pad = call["self"], list(call["pad"])
    if call.depends_on_batch(pad):
        return call.mixed
    rank = call.rank(source)
    changed = {rank - 1 - index // 2 for index, amount in enumerate(pad) if amount != 0}
    return call.aligned({source: [None if index in changed else index for index in range(rank)]})


def unfold(call: Call) -> Role:
    """Windows along a dimension."""
    source = call["self"]
    dimension = call.dimension(source, call["dimension"])
    return call.aligned({source: [None if index == dimension else index for index in range(call.rank(source))]})


def take(call: Call) -> Role:
    """``index_select``: one dimension is looked up, by indices that every microbatch has or by rows into a table."""
    source, index, dim = call["self"], call["index"], call.dimension(call["self"], call["dim"])
    kept: list[int | None] = [None if each == dim else each for each in range(call.rank(source))]
    return call.aligned({source: kept, index: [dim] if call.rank(index) == 1 else []})


def positions(call: Call) -> Role:
    """The result depends on positions in the last two dimensions (``triu``, ``tril``)."""
    source = call["self"]
    return call.aligned({source: call.leading(source, 2)})
