"""The roles that values play towards the batch, and the roles of results from the sharding rule of their call.

    input_ids  Rows(0)     position_ids  Same     labels  Rows(0)
        |                       |                    |
    embedding  Rows(0)     embedding  Same           |
        +----------- add -------+                    |
                      | Rows(0)                      |
                    linear  Rows(0) ---- view ---- cross_entropy_loss  Total("mean")

Microbatches cut one loop of a call: the factor of its rule that runs over the batch. What the rule says about that factor is the role:

    the factor is in the results            Rows      (a shard of the batch)
    the results are reduced over it         Total     (a partial sum, or a partial mean)
    operands are totals, the call linear    Total
    the factor is whole                     rows meet
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx

from passes.analysis.batch_sizes import depends_on
from passes.graph.schemas import packet, views_its_arguments
from passes.rules.call import Call, Operand
from passes.rules.loops import Dimension, LocalCall, Loops
from passes.rules.registry import loops_of_call

__all__ = ["Mixed", "Role", "Roles", "RowNumbers", "Rows", "Same", "Total", "batch_dimension", "roles_by_rule"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Same:
    """Equal in every microbatch: it depends on no input that holds the batch."""


@dataclass(frozen=True)
class Rows:
    """Each row depends on that row of the inputs alone; microbatches concatenate to the batch.

    Attributes:
        dimension: the one whose size is a multiple of the batch size.
        before: how many blocks of the batch the dimension holds: ``(3, batch)`` flattened is ``3 * batch`` with 3 before.
    """

    dimension: int
    before: int = 1


@dataclass(frozen=True)
class RowNumbers:
    """The numbers of the rows, 0 to batch - 1: they may pick each row of another value, and nothing else.

    Attributes:
        dimension: the one that counts.
    """

    dimension: int


@dataclass(frozen=True)
class Total:
    """A mean or a sum over the rows of the batch of what each row gives.

    Attributes:
        kind: which of the two.
        counted: a mean over the targets that count (``ignore_index``), not over the rows: microbatches weigh by their counts.
    """

    kind: Literal["mean", "sum"]
    counted: bool = False


@dataclass(frozen=True)
class Mixed:
    """Anything else: microbatches do not give it.

    Attributes:
        node: the operation where the rows met.
    """

    node: fx.Node


Role: TypeAlias = "Same | Rows | RowNumbers | Total | Mixed"
"""What one tensor is to the batch."""

Roles: TypeAlias = tuple[Role, ...]
"""One for each result of a call."""


def roles_by_rule(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the roles of the results of a call.

    Args:
        call: with sizes as expressions in the batch.
        roles: of its operands.

    Returns:
        None where rows meet, or no rule says what becomes of them.
    """
    loops = loops_of_call(call)
    if loops is None:
        return None
    if any(isinstance(role, RowNumbers) for role in roles) and (views_its_arguments(call.operator) or packet(call.operator) is aten.clone):
        return _moved_numbers(call, roles, batch)
    read = [role if operand.index not in loops.unread else Same() for operand, role in zip(call.operands, roles, strict=True)]
    if any(isinstance(role, Total) for role in read):
        return _of_totals(call, loops, read, batch)
    held = {
        _batch_factor(role, dimensions, loops, batch) if isinstance(role, Rows) else None
        for role, dimensions in zip(read, loops.operands, strict=True)
        if not isinstance(role, Same)
    }
    if not held and not depends_on(batch, (_numbers(call.values), call.results)):
        return (Same(),) * len(call.results)
    found = held.pop() if held else _made_factor(loops, batch)
    if held or found is None or not _passes_sizes(call, loops, found[0], batch):
        return None
    return _of_factor(loops, *found)


def batch_dimension(shape: Sequence[object], batch: sympy.Symbol) -> int | None:
    """The one dimension whose size depends on the batch; None when there is none or several."""
    found = [index for index, size in enumerate(shape) if depends_on(batch, size)]
    return found[0] if len(found) == 1 else None


def _moved_numbers(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Views move row numbers as they move rows."""
    moved = [Rows(role.dimension) if isinstance(role, RowNumbers) else role for role in roles]
    found = roles_by_rule(call, moved, batch) or ()
    whole = all(isinstance(role, Rows) and shape[role.dimension] == batch for role, shape in zip(found, call.results, strict=False))
    return tuple(RowNumbers(role.dimension) for role in found if isinstance(role, Rows)) if found and whole else None


def _of_totals(call: Call, loops: Loops, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """What is linear in means gives a mean, in sums a sum: all operands of one linear set, whatever is the same in the others.

    A value that is the same in every microbatch is the mean of itself.
    """
    totals = [role for role in roles if isinstance(role, Total)]
    total = Total(totals[0].kind, any(each.counted for each in totals))
    if len({each.kind for each in totals}) > 1 or any(not isinstance(role, Total | Same) for role in roles):
        return None
    if depends_on(batch, _numbers(call.values)):
        return None
    for members in loops.linear:
        outside = {index for index, role in enumerate(roles) if isinstance(role, Total)} - members
        if not outside and (total.kind == "mean" or all(isinstance(roles[index], Total) for index in members - loops.unread)):
            return (total,) * len(loops.results)
    return None


_Factor: TypeAlias = "tuple[int, int]"
"""The factor that runs over the batch, and how many blocks of the batch it holds."""


def _batch_factor(role: Rows, dimensions: Sequence[Dimension], loops: Loops, batch: sympy.Symbol) -> _Factor | None:
    """Find the factor of an operand's rows; None where the factors of the dimension cut through rows."""
    dimension = dimensions[role.dimension]
    places = [place for place, factor in enumerate(dimension) if depends_on(batch, loops.factors[factor].size)]
    if len(places) != 1:
        return None
    factor, outer = dimension[places[0]], _size(loops, dimension[: places[0]])
    multiple = sympy.sympify(loops.factors[factor].size) / batch
    if outer is None or role.before % outer or not multiple.is_Integer or int(multiple) % (role.before // outer):
        return None
    return factor, role.before // outer


def _made_factor(loops: Loops, batch: sympy.Symbol) -> _Factor | None:
    """Find the factor of the batch in a result whose operands are the same for every row: each row gets the same value, or draws."""
    made = {factor for result in loops.results for each in result for factor in each if depends_on(batch, loops.factors[factor].size)}
    return (made.pop(), 1) if len(made) == 1 else None


def _size(loops: Loops, factors: Dimension) -> int | None:
    size = math.prod((loops.factors[factor].size for factor in factors), start=1)
    return size if isinstance(size, int) else None


def _passes_sizes(call: Call, loops: Loops, factor: int, batch: sympy.Symbol) -> bool:
    """Whether a microbatch passes the arguments that a part of this factor must: those that depend on the batch are sizes to the rule."""
    numbers = {name for name, value in call.values if depends_on(batch, _numbers(value))}
    if not numbers:
        return True
    if loops.localize is None:
        return False
    shapes = tuple(operand.shape for operand in call.operands)
    sizes = tuple(each.size for each in loops.factors)
    return numbers <= set(loops.localize(LocalCall(call.arguments, shapes, call.results, sizes, frozenset({factor}))))


def _numbers(value: Any) -> Any:
    """An argument, or all of them, without the tensors."""
    if isinstance(value, tuple):
        return tuple(_numbers(each) for each in value)
    return None if isinstance(value, Operand) else value


def _of_factor(loops: Loops, factor: int, before: int) -> Roles | None:
    """The roles of the results when the factor is cut into microbatches."""
    if any(factor in (window.factor, window.part) for window in loops.windows):
        return None
    reduction = loops.factors[factor].reduction
    if reduction in ("sum", "mean") and not loops.added:  # what is added to a sum is added once, and microbatches add it each
        return (Total("sum" if reduction == "sum" else "mean"),) * len(loops.results)
    if reduction is not None:
        return None
    found = []
    for result in loops.results:
        places = [place for place, dimension in enumerate(result) if factor in dimension]
        if len(places) != 1:
            return None
        dimension = result[places[0]]
        outer = _size(loops, dimension[: dimension.index(factor)])
        if outer is None:
            return None
        found.append(Rows(places[0], outer * before))
    return tuple(found)
