"""Roles of values with respect to the batch, and the roles of a call's results by its sharding rule.

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
    the factor is whole                     rows are mixed
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
    """A mean or a sum over the rows of the batch.

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
        node: the operation that mixes rows.
    """

    node: fx.Node


Role: TypeAlias = "Same | Rows | RowNumbers | Total | Mixed"
"""How one tensor depends on the rows of the batch."""

Roles: TypeAlias = tuple[Role, ...]
"""One for each result of a call."""


def roles_by_rule(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the roles of the results of a call.

    Args:
        call: with sizes as expressions in the batch.
        roles: of its operands.

    Returns:
        None where rows are mixed, or the operation has no rule.
    """
    loops = loops_of_call(call)
    if loops is None:
        return None
    if any(isinstance(role, RowNumbers) for role in roles) and (views_its_arguments(call.operator) or packet(call.operator) is aten.clone):
        return _row_number_roles(call, roles, batch)
    read = [role if operand.index not in loops.unread else Same() for operand, role in zip(call.operands, roles, strict=True)]
    if any(isinstance(role, Total) for role in read):
        return _total_roles(call, loops, read, batch)
    of_operands = {  # the batch factor as each operand has it: operands must agree
        _batch_factor(role, dimensions, loops, batch) if isinstance(role, Rows) else None
        for role, dimensions in zip(read, loops.operands, strict=True)
        if not isinstance(role, Same)
    }
    if not of_operands and not depends_on(batch, (_without_tensors(call.values), call.results)):
        return (Same(),) * len(call.results)
    batch_factor = of_operands.pop() if of_operands else _factor_of_results(loops, batch)
    if of_operands or batch_factor is None or not _can_pass_sizes(call, loops, batch_factor[0], batch):
        return None
    return _roles_by_factor(loops, *batch_factor)


def batch_dimension(shape: Sequence[object], batch: sympy.Symbol) -> int | None:
    """Return the one dimension whose size depends on the batch; None if there is none, or several."""
    dimensions = [index for index, size in enumerate(shape) if depends_on(batch, size)]
    return dimensions[0] if len(dimensions) == 1 else None


def _row_number_roles(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the roles of views or clones of row numbers: a view moves row numbers as it moves rows."""
    as_rows = [Rows(role.dimension) if isinstance(role, RowNumbers) else role for role in roles]
    moved = roles_by_rule(call, as_rows, batch) or ()
    whole = all(isinstance(role, Rows) and shape[role.dimension] == batch for role, shape in zip(moved, call.results, strict=False))
    return tuple(RowNumbers(role.dimension) for role in moved if isinstance(role, Rows)) if moved and whole else None


def _total_roles(call: Call, loops: Loops, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the roles of a call on totals: a total of the same kind where the call is linear in them, else None.

    The totals must be in one linear set of operands. For sums, that set must have no other operands; for means it may have values that
    are the same in every microbatch, since such a value is the mean of itself.
    """
    totals = [role for role in roles if isinstance(role, Total)]
    total = Total(totals[0].kind, any(each.counted for each in totals))
    if len({each.kind for each in totals}) > 1 or any(not isinstance(role, Total | Same) for role in roles):
        return None
    if depends_on(batch, _without_tensors(call.values)):
        return None
    for members in loops.linear:
        outside = {index for index, role in enumerate(roles) if isinstance(role, Total)} - members
        if not outside and (total.kind == "mean" or all(isinstance(roles[index], Total) for index in members - loops.unread)):
            return (total,) * len(loops.results)
    return None


_Factor: TypeAlias = "tuple[int, int]"
"""The factor that runs over the batch, and how many blocks of the batch it holds."""


def _batch_factor(role: Rows, dimensions: Sequence[Dimension], loops: Loops, batch: sympy.Symbol) -> _Factor | None:
    """Return the factor that runs over an operand's rows; None if no one factor does, or it cuts blocks of the batch apart."""
    dimension = dimensions[role.dimension]
    places = [place for place, factor in enumerate(dimension) if depends_on(batch, loops.factors[factor].size)]
    if len(places) != 1:
        return None
    factor, outer = dimension[places[0]], _fixed_size(loops, dimension[: places[0]])
    multiple = sympy.sympify(loops.factors[factor].size) / batch
    if outer is None or role.before % outer or not multiple.is_Integer or int(multiple) % (role.before // outer):
        return None
    return factor, role.before // outer


def _factor_of_results(loops: Loops, batch: sympy.Symbol) -> _Factor | None:
    """Return the factor that runs over the batch in the results alone, as in ``zeros(batch, 3)`` or ``rand(batch)``."""
    factors = {factor for result in loops.results for dimension in result for factor in dimension}
    batched = {factor for factor in factors if depends_on(batch, loops.factors[factor].size)}
    return (batched.pop(), 1) if len(batched) == 1 else None


def _fixed_size(loops: Loops, factors: Dimension) -> int | None:
    """Return the product of factors' sizes; None if it depends on the batch."""
    size = math.prod((loops.factors[factor].size for factor in factors), start=1)
    return size if isinstance(size, int) else None


def _can_pass_sizes(call: Call, loops: Loops, factor: int, batch: sympy.Symbol) -> bool:
    """Return whether the rule can replace every argument that depends on the batch by that of a part of the factor."""
    batched = {name for name, value in call.values if depends_on(batch, _without_tensors(value))}
    if not batched:
        return True
    if loops.localize is None:
        return False
    shapes = tuple(operand.shape for operand in call.operands)
    sizes = tuple(each.size for each in loops.factors)
    return batched <= set(loops.localize(LocalCall(call.arguments, shapes, call.results, sizes, frozenset({factor}))))


def _without_tensors(value: Any) -> Any:
    """Return an argument, or a tuple of arguments, with None in place of tensors."""
    if isinstance(value, tuple):
        return tuple(_without_tensors(part) for part in value)
    return None if isinstance(value, Operand) else value


def _roles_by_factor(loops: Loops, factor: int, before: int) -> Roles | None:
    """Return the roles of the results if microbatches cut a factor that holds ``before`` blocks of the batch; None if rows are mixed."""
    if any(factor in (window.factor, window.part) for window in loops.windows):
        return None
    reduction = loops.factors[factor].reduction
    if reduction in ("sum", "mean") and not loops.added:  # every microbatch would add an added operand once more
        return (Total("sum" if reduction == "sum" else "mean"),) * len(loops.results)
    if reduction is not None:
        return None
    roles = []
    for result in loops.results:
        places = [place for place, dimension in enumerate(result) if factor in dimension]
        if len(places) != 1:
            return None
        dimension = result[places[0]]
        outer = _fixed_size(loops, dimension[: dimension.index(factor)])
        if outer is None:
            return None
        roles.append(Rows(places[0], outer * before))
    return tuple(roles)
