"""Follow the batch through a graph: what becomes of every result when the batch is cut into microbatches.

The sharding rule of a call says it (``passes.analysis.batch_roles``), but for the few operations in ``EXCEPTIONS``, which depend on more
than which loop the batch is: on the order of elements in memory, on numbers, or on what a microbatch may do that a shard may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from passes.analysis.axes import tensor_operands
from passes.analysis.batch_roles import Mixed, Role, Roles, RowNumbers, Rows, Same, Total, batch_dimension, roles_by_rule
from passes.analysis.batch_sizes import Sizes, depends_on
from passes.analysis.row_statistics import takes_row_statistics
from passes.graph.provenance import module_path, place_of
from passes.graph.schemas import MEAN, SUM, bound_arguments, functional, packet
from passes.ir.graph import Combine, RowMixing
from passes.ir.torch_private import OpOverload
from passes.rules.call import Call, Operand
from passes.rules.registry import rule_of
from passes.rules.tables import RESHAPES

__all__ = [
    "COUNTED_LOSSES", "EXCEPTIONS", "MEANS_ADDED", "MEANS_KEPT", "MEANS_SCALED", "BatchFlow", "combination", "follow_batch", "result_roles",
]  # fmt: skip

aten = torch.ops.aten

COUNTED_LOSSES = frozenset({aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default})
"""Losses whose mean is over the targets that are not ignored."""

MEANS_ADDED = frozenset({aten.add.Tensor, aten.sub.Tensor})
"""Adds two means over counted targets. ``passes.spmd.mean_to_sum`` follows such a mean through this and the next two, and no further."""

MEANS_SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default})
"""Multiplies such a mean by a number."""

MEANS_KEPT = frozenset({aten.clone.default, aten.to.dtype, aten.alias.default, aten._to_copy.default})  # noqa: SLF001
"""Gives such a mean again, perhaps in another type."""


@dataclass(frozen=True)
class BatchFlow:
    """What a graph does to the rows of its batch.

    Attributes:
        roles: node -> its role; several for a node that gives unlike tensors.
        sizes: where sizes and numbers were read.
        mixing: where rows are mixed outside of the results: statistics of normalisations.
    """

    roles: Mapping[fx.Node, Role | Roles]
    sizes: Sizes
    mixing: RowMixing


def follow_batch(graph: fx.Graph, sizes: Sizes, batched: Mapping[str, int], countable: Collection[str]) -> BatchFlow:
    """The role of every value of a graph.

    Args:
        sizes: its sizes and numbers.
        batched: input placeholder -> the dimension that holds the batch.
        countable: nodes that follow from the inputs alone, so that targets among them can be counted over the whole batch.
    """
    walk = _Walk(sizes, batched, countable)
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function"):
            walk.roles[node] = walk.role(node)
    return BatchFlow(walk.roles, sizes, RowMixing(tuple(walk.normalizations)))


def combination(node: fx.Node, flow: BatchFlow) -> tuple[Combine, int | None, str | None]:
    """What to do with a result over microbatches, the dimension to concatenate over, and why nothing can be done with it."""
    number = flow.sizes.number(node)
    if number is not None:
        if not isinstance(number, sympy.Expr):
            return "same", None, None
        return ("sum", None, None) if not (number / flow.sizes.batch).free_symbols else ("mixed", None, _why(node))
    role = flow.roles[node]
    if isinstance(role, Rows) and role.before == 1:
        return "concatenate", role.dimension, None
    if isinstance(role, Same):
        return "same", None, None
    if isinstance(role, Total):
        return role.kind, None, None
    return "mixed", None, _why(role.node if isinstance(role, Mixed) else node)


def _why(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload) and rule_of(node.target) is None:
        return f"no rule says what becomes of the rows of the batch in {place_of(node)}, and register_rule can"
    return f"rows of the batch meet in {place_of(node)}"


class _Walk:
    """One pass over the nodes, in order.

    Attributes:
        roles: of the nodes so far.
        normalizations: module paths of those that have mixed rows outside of the results.
    """

    def __init__(self, sizes: Sizes, batched: Mapping[str, int], countable: Collection[str]) -> None:
        self.roles: dict[fx.Node, Role | Roles] = {}
        self._sizes = sizes
        self._batched = batched
        self._countable = countable
        self.normalizations: dict[str, None] = {}

    def role(self, node: fx.Node) -> Role | Roles:
        if node.op == "placeholder":
            return Rows(self._batched[node.name]) if node.name in self._batched else Same()
        if self._sizes.number(node) is not None:
            return Same()
        mixed = next((role for source in node.all_input_nodes for role in _each(self.roles[source]) if isinstance(role, Mixed)), None)
        if mixed is not None:
            return mixed
        call = self._sizes.call(node) if isinstance(node.target, OpOverload) else None
        return self._of_python(node) if call is None else self._of_call(node, call)

    def _of_python(self, node: fx.Node) -> Role:
        """Items of lists, and arithmetic on numbers that values decide."""
        sources = node.all_input_nodes
        if getattr(node.target, "__name__", "") == "getitem":
            role = self.roles[sources[0]]
            return role[node.args[1]] if isinstance(role, tuple) else role  # type: ignore[index]
        numbers = [self._sizes.number(source) for source in sources]
        same = all(self.roles[source] == Same() for source in sources)
        return Same() if same and not depends_on(self._sizes.batch, tuple(numbers)) else Mixed(node)

    def _of_call(self, node: fx.Node, call: Call) -> Role | Roles:
        batch = self._sizes.batch
        roles = [self._of_operand(operand) for operand in tensor_operands(node)]
        if all(isinstance(role, Same) for role in roles) and not depends_on(batch, (call.values, call.results)):
            return Same()
        if takes_row_statistics(node):
            self.normalizations[module_path(node)] = None
        found = result_roles(call, roles, batch)
        if found is None or not all(_fits(role, shape, batch) for role, shape in zip(found, call.results, strict=True)):
            return Mixed(node)
        if any(isinstance(role, Total) and role.counted for role in found) and not self._is_countable(node):
            return Mixed(node)
        return found[0] if len(set(found)) == 1 else found

    def _of_operand(self, node: fx.Node) -> Role:
        role = self.roles[node]
        return role if not isinstance(role, tuple) else Mixed(node)

    def _is_countable(self, node: fx.Node) -> bool:
        """Whether the targets of a loss are known before the batch is cut."""
        given = bound_arguments(node)
        known = [given["target"], given.get("weight")] if "target" in given else []
        return all(part.name in self._countable for part in known if isinstance(part, fx.Node))


def _each(role: Role | Roles) -> Roles:
    return role if isinstance(role, tuple) else (role,)


def _fits(role: Role, shape: Sequence[Any], batch: sympy.Symbol) -> bool:
    """Whether sizes agree with a role: the batch is in its dimension, as a multiple of the batch size, and in no other."""
    if isinstance(role, Rows | RowNumbers):
        if batch_dimension(shape, batch) != role.dimension:
            return False
        multiple = shape[role.dimension] / batch
        return bool(multiple.is_Integer) and int(multiple) % (role.before if isinstance(role, Rows) else 1) == 0
    return not depends_on(batch, tuple(shape))


# -- calls whose rule does not say it all ------------------------------------------------------------------------------------------


def result_roles(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the roles of the results of a call; None where rows meet. See ``roles_by_rule``."""
    operator = functional(call.operator) or call.operator
    exception = EXCEPTIONS.get(operator) or EXCEPTIONS.get(packet(operator))
    found = exception(call, roles, batch) if exception is not None else None
    found = found or roles_by_rule(call, roles, batch) or _without_elements(call, batch)
    if found is None or not any(isinstance(role, Total) and role.counted for role in found):
        return found
    return found if _is_followed(call, roles) else None


_Exception: TypeAlias = "Callable[[Call, Sequence[Role], sympy.Symbol], Roles | None]"
"""The roles of results where the rule alone would not find them; None leaves it to the rule."""


def _with(call: Call, **values: Any) -> Call:
    """The call with other numbers."""
    return replace(call, values=tuple({**call.arguments, **values}.items()))


def _without_elements(call: Call, batch: sympy.Symbol) -> Roles | None:
    """A result without elements is what its sizes say."""
    if not all(0 in shape for shape in call.results):
        return None
    places = [batch_dimension(shape, batch) for shape in call.results]
    return tuple(Same() if place is None else Rows(place) for place in places)


def _reshaped(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """The batch stays where it is in the flattened index.

    The rule cuts both shapes into common factors, from the left, and knows nothing of blocks of the batch in a dimension: for it, 3 * batch
    rows may be 3 blocks of rows or rows of 3.
    """
    role, before, after = roles[0], call.operands[0].shape, call.results[0]
    target = batch_dimension(after, batch)
    if not isinstance(role, Rows) or target is None or 0 in before:
        return roles_by_rule(call, [role, *[Same()] * (len(roles) - 1)], batch)  # of a second operand, only sizes are read
    blocks = math.prod(before[: role.dimension], start=role.before)
    outer = math.prod(after[:target], start=1)
    if depends_on(batch, (blocks, outer)) or blocks % outer:
        return None
    inside, multiple = int(blocks // outer), after[target] / batch
    return (Rows(target, inside),) if multiple.is_Integer and int(multiple) % inside == 0 else None


def _squeezed(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """The batch stays, whatever its size: only dimensions of one leave. A shard might be of one row, and is not cut there."""
    shape, given = call.operands[0].shape, call.get("dim")
    chosen = range(len(shape)) if given is None else given if isinstance(given, tuple) else (given,)
    ones = tuple(dim for dim in chosen if shape and shape[dim] == 1)
    return roles_by_rule(_with(call, dim=ones), roles, batch) if ones else (roles[0],)


def _made_like(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Only the sizes of the operand are read; rules tell operands of which neither sizes nor numbers are."""
    role = roles[0]
    sized = Rows(role.dimension) if isinstance(role, RowNumbers) else Same() if isinstance(role, Total) else role
    return roles_by_rule(call, [sized], batch)


def _expanded(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Only the sizes of the second operand are read."""
    return roles_by_rule(call, [roles[0], Same()], batch)


def _row_numbers(call: Call, _roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """``arange(batch)`` counts rows."""
    counts = call["end"] == batch and call.get("start", 0) == 0 and call.get("step", 1) == 1
    return (RowNumbers(0),) if counts else None


def _picked(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Row numbers pick each row of the operand for itself: the rows of the operand are those of the numbers."""
    source, picks = call.operands[0], call["indices"]
    numbered = [place for place, pick in enumerate(picks) if isinstance(pick, Operand) and isinstance(roles[pick.index], RowNumbers)]
    if len(numbered) != 1 or roles[0] != Rows(numbered[0]) or source.shape[numbered[0]] != batch:
        return None
    if any(isinstance(pick, Operand) and pick.dtype in (torch.bool, torch.uint8) for pick in picks):
        return None
    return roles_by_rule(call, [Same(), *(Rows(each.dimension) if isinstance(each, RowNumbers) else each for each in roles[1:])], batch)


def _scaled(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """A sum over the batch divided by its size is a mean, and a mean times its size a sum."""
    number, divides = call["other"], "div" in call.operator.name()
    if isinstance(number, Operand) or not isinstance(roles[0], Total) or not depends_on(batch, number) or call.get("rounding_mode"):
        return None
    factor = 1 / number if divides else number
    if roles[0] == Total("sum") and not depends_on(batch, factor * batch):
        return (Total("mean"),)
    return (Total("sum"),) if roles[0] == Total("mean") and not depends_on(batch, factor / batch) else None


def _shifted(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """A mean over rows plus a number is the mean of the sums; for rules, which know nothing of weights, it is not linear."""
    numbers = [name for name in ("other", "self", "value") if not isinstance(call.get(name), Operand | None)]
    if list(roles) != [Total("mean")] or not numbers or depends_on(batch, call[numbers[0]]):
        return None
    return roles_by_rule(_with(call, **{numbers[0]: 0}), roles, batch)


def _counted(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """A mean over class targets divides by those that are not ignored, weighted by class: no mean of parts, but a sum that is divided."""
    if call["reduction"] != MEAN or call.operand("target").known_dtype.is_floating_point:
        return None
    summed = roles_by_rule(_with(call, reduction=SUM), roles, batch)
    return (Total("mean", counted=True),) if summed == (Total("sum"),) else None


def _is_followed(call: Call, roles: Sequence[Role]) -> bool:
    """Whether a mean over counted targets stays one that can be counted over the whole batch."""
    if not any(isinstance(role, Total) for role in roles):
        return call.operator in COUNTED_LOSSES
    if call.operator in MEANS_ADDED:
        return len(roles) == 2
    return call.operator in MEANS_SCALED | MEANS_KEPT and len(roles) == 1


def _normalised(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Statistics over the batch are taken over each microbatch, which is said to the user; see ``RowMixing``."""
    flag = "training" if "training" in call.arguments else "use_input_stats"
    if not call[flag] or (flag == "use_input_stats" and call["running_mean"] is None):
        return None
    found = roles_by_rule(_with(call, **{flag: False}), roles, batch)
    return found if found and isinstance(found[0], Rows) and found[0].dimension == 0 else None


EXCEPTIONS: Mapping[Any, _Exception] = {
    **{operator: _reshaped for operators in RESHAPES.values() for operator in operators},
    **dict.fromkeys((aten.mul, aten.multiply, aten.div, aten.divide, aten.true_divide), _scaled),
    **dict.fromkeys((each.overloadpacket for each in COUNTED_LOSSES), _counted),
    **dict.fromkeys((aten.add, aten.constant_pad_nd, aten.pad, aten.rsub, aten.sub), _shifted),
    **dict.fromkeys((aten.empty_like, aten.full_like, aten.ones_like, aten.zeros_like), _made_like),
    **dict.fromkeys((aten.rand_like, aten.randint_like, aten.randn_like), _made_like),
    aten.arange: _row_numbers,
    aten.batch_norm: _normalised,
    aten.expand_as: _expanded,
    aten.index: _picked,
    aten.instance_norm: _normalised,
    aten.squeeze: _squeezed,
}
"""Operator, or one of its overloads -> what there is to know beside its rule."""
