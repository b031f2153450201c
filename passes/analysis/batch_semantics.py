"""Follow the batch through a graph: find how each result of the whole batch follows from the results of microbatches.

The sharding rule of a call decides (``passes.analysis.batch_roles``), except for the operations in ``EXCEPTIONS``: their results also
depend on the order of elements in memory, or on numbers, or they allow microbatches where they forbid shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from passes.analysis.batch_roles import Mixed, Role, Roles, RowNumbers, Rows, Same, Total, batch_dimension, roles_by_rule
from passes.analysis.batch_sizes import Sizes, depends_on
from passes.analysis.row_statistics import takes_row_statistics
from passes.graph.provenance import module_path, place_of
from passes.graph.schemas import MEAN, SUM, bound_arguments, functional, packet, tensor_operands
from passes.ir.graph import Combine, RowMixing
from passes.ir.torch_private import OpOverload
from passes.rules.call import Call, Operand
from passes.rules.mean_losses import COUNTED_LOSSES, MEANS_ADDED, MEANS_KEPT, MEANS_SCALED, counted_leaves, mean_terms
from passes.rules.non_negative import ignores_nothing, non_negative
from passes.rules.ops.channel_statistics import channel_statistics
from passes.rules.registry import rule_of
from passes.rules.tables import RESHAPES

aten = torch.ops.aten


@dataclass(frozen=True)
class BatchFlow:
    """The roles of a graph's values with respect to the batch.

    Attributes:
        roles: node -> its role; one for each result if the node has several results with different roles.
        sizes: source of sizes and numbers.
        mixing: normalisations whose statistics mix rows, although their results are rows.
        weighted: division of a sum over rows by a total of weights -> the number of calls from the total to the divisor (``WEIGHTED``).
        counted: the calls that compute a mean over the targets that count.
    """

    roles: Mapping[fx.Node, Role | Roles]
    sizes: Sizes
    mixing: RowMixing
    weighted: Mapping[fx.Node, int]
    counted: tuple[fx.Node, ...]


def follow_batch(graph: fx.Graph, sizes: Sizes, batched: Mapping[str, int], countable: Collection[str]) -> BatchFlow:
    """Return the role of every value of a graph.

    Args:
        sizes: its sizes and numbers.
        batched: input placeholder -> the dimension that holds the batch.
        countable: nodes that depend on the inputs alone: targets among them can be counted before the batch is split.
    """
    walk = _Walk(sizes, batched, countable, non_negative(graph))
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function"):
            walk.roles[node] = walk.role(node)
    counted = counted_leaves(graph, batched, walk.weighted.__contains__)
    return BatchFlow(walk.roles, sizes, RowMixing(tuple(walk.normalizations)), walk.weighted, counted)


def combination(node: fx.Node, flow: BatchFlow) -> tuple[Combine, int | None, str | None]:
    """Return how to combine a result over microbatches, the dimension if it is "concatenate", and the reason if it is "mixed"."""
    number = flow.sizes.number(node)
    if number is not None:
        if not isinstance(number, sympy.Expr):
            return "same", None, None
        is_multiple_of_batch = not (number / flow.sizes.batch).free_symbols
        return ("sum", None, None) if is_multiple_of_batch else ("mixed", None, _why_mixed(node))
    role = flow.roles[node]
    if isinstance(role, Rows) and role.before == 1:
        return "concatenate", role.dimension, None
    if isinstance(role, Same):
        return "same", None, None
    if isinstance(role, Total) and (not role.counted or _can_be_summed(node, flow)):
        return role.kind, None, None
    return "mixed", None, _why_mixed(role.node if isinstance(role, Mixed) else node)


def _can_be_summed(node: fx.Node, flow: BatchFlow) -> bool:
    """Return whether ``passes.spmd.mean_to_sum`` can compute a mean over the targets that count as a sum of parts."""
    terms = mean_terms(node, flow.counted)
    counted = Total("mean", counted=True)
    return terms is not None and all((mean in flow.counted) == (flow.roles[mean] == counted) for mean in terms.means)


def _why_mixed(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload) and rule_of(node.target) is None:
        return f"no rule says what becomes of the rows of the batch in {place_of(node)}, and register_rule can"
    return f"rows of the batch are mixed by {place_of(node)}"


class _Walk:
    """One pass over the nodes, in order.

    Attributes:
        roles: of the nodes so far.
        normalizations: module paths of normalisations whose statistics mix rows, in order.
        weighted: see ``BatchFlow``.
    """

    def __init__(self, sizes: Sizes, batched: Mapping[str, int], countable: Collection[str], non_negative: Collection[str]) -> None:
        self.roles: dict[fx.Node, Role | Roles] = {}
        self._sizes = sizes
        self._batched = batched
        self._countable = countable
        self._non_negative = non_negative
        self.normalizations: dict[str, None] = {}
        self.weighted: dict[fx.Node, int] = {}

    def role(self, node: fx.Node) -> Role | Roles:
        """Return the role of a node whose operands have theirs; a node that reads a mixed value is mixed by the same operation."""
        if node.op == "placeholder":
            return Rows(self._batched[node.name]) if node.name in self._batched else Same()
        if self._sizes.number(node) is not None:
            return Same()
        if (calls := self._calls_to_divisor(node)) is not None:
            self.weighted[node] = calls
            return Total("mean", counted=True)
        for source in node.all_input_nodes:
            mixed = next((role for role in _as_tuple(self.roles[source]) if isinstance(role, Mixed)), None)
            if mixed is not None:
                return mixed
        call = self._sizes.call(node) if isinstance(node.target, OpOverload) else None
        return self._python_role(node) if call is None else self._call_role(node, call)

    def _python_role(self, node: fx.Node) -> Role:
        """Return the role of an item of a list, or of arithmetic on numbers that depend on values of tensors."""
        sources = node.all_input_nodes
        if getattr(node.target, "__name__", "") == "getitem":
            role = self.roles[sources[0]]
            return role[node.args[1]] if isinstance(role, tuple) else role  # type: ignore[index]
        numbers = [self._sizes.number(source) for source in sources]
        same = all(self.roles[source] == Same() for source in sources)
        return Same() if same and not depends_on(self._sizes.batch, tuple(numbers)) else Mixed(node)

    def _call_role(self, node: fx.Node, call: Call) -> Role | Roles:
        """Return the role of an operator's result, or one for each result if they differ; Mixed if sizes contradict the roles."""
        batch = self._sizes.batch
        roles = [self._operand_role(operand) for operand in tensor_operands(node)]
        if all(isinstance(role, Same) for role in roles) and not depends_on(batch, (call.values, call.results)):
            return Same()
        if takes_row_statistics(node):
            self.normalizations[module_path(node)] = None
        results = result_roles(call, roles, batch)
        if results is None or not all(_fits(role, shape, batch) for role, shape in zip(results, call.results, strict=True)):
            return Mixed(node)
        if any(isinstance(role, Total) and role.counted for role in results) and not self._is_countable(node):
            return Mixed(node)
        return results[0] if len(set(results)) == 1 else results

    def _calls_to_divisor(self, node: fx.Node) -> int | None:
        """Return the number of calls from a total of weights to the divisor of a sum over rows; None: a call is no such weighted mean."""
        numerator, divisor = node.args if node.target is aten.div.Tensor and len(node.args) == 2 else (None, None)
        if not (isinstance(numerator, fx.Node) and isinstance(divisor, fx.Node) and self.roles[numerator] == Total("sum")):
            return None
        values = numerator.meta["val"], divisor.meta["val"]
        if not all(isinstance(value, torch.Tensor) and value.dim() == 0 for value in values):
            return None
        calls, total = 0, divisor
        while self.roles[total] != Total("sum"):
            if len(total.all_input_nodes) != 1 or total.args[:1] != (total.all_input_nodes[0],):
                return None
            calls, total = calls + 1, total.all_input_nodes[0]
        return calls if total.op == "call_function" and {total.name, divisor.name} <= set(self._countable) else None

    def _operand_role(self, node: fx.Node) -> Role:
        role = self.roles[node]
        return role if not isinstance(role, tuple) else Mixed(node)

    def _is_countable(self, node: fx.Node) -> bool:
        """Return whether the targets of a loss that count, and its class weights, are known before the batch is split."""
        if ignores_nothing(node, self._non_negative, self._sizes.batch):
            return True
        arguments = bound_arguments(node)
        counted = [arguments["target"], arguments.get("weight")] if "target" in arguments else []
        return all(value.name in self._countable for value in counted if isinstance(value, fx.Node))


def _as_tuple(role: Role | Roles) -> Roles:
    return role if isinstance(role, tuple) else (role,)


def _fits(role: Role, shape: Sequence[Any], batch: sympy.Symbol) -> bool:
    """Return whether sizes agree with a role: the batch is in its dimension, as a multiple of the batch size, and in no other."""
    if isinstance(role, Rows | RowNumbers):
        if batch_dimension(shape, batch) != role.dimension:
            return False
        multiple = shape[role.dimension] / batch
        return bool(multiple.is_Integer) and int(multiple) % (role.before if isinstance(role, Rows) else 1) == 0
    return not depends_on(batch, tuple(shape))


# -- exceptions to the rules -------------------------------------------------------------------------------------------------------


def result_roles(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the roles of the results of a call; None where rows are mixed. See ``roles_by_rule``."""
    operator = functional(call.operator) or call.operator
    exception = EXCEPTIONS.get(operator) or EXCEPTIONS.get(packet(operator))
    results = exception(call, roles, batch) if exception is not None else None
    results = results or roles_by_rule(call, roles, batch) or _empty_roles(call, batch)
    has_counted_mean = results is not None and any(isinstance(role, Total) and role.counted for role in results)
    return None if has_counted_mean and not _keeps_counted_mean(call, roles) else results


_Exception: TypeAlias = "Callable[[Call, Sequence[Role], sympy.Symbol], Roles | None]"
"""Arguments of ``roles_by_rule`` -> the roles of the results; None to use the rule."""


def _with(call: Call, **values: Any) -> Call:
    """Return the call with other values of some arguments."""
    return replace(call, values=tuple({**call.arguments, **values}.items()))


def _empty_roles(call: Call, batch: sympy.Symbol) -> Roles | None:
    """Return the roles of results without elements, by their sizes alone; None if a result has elements."""
    if not all(0 in shape for shape in call.results):
        return None
    places = [batch_dimension(shape, batch) for shape in call.results]
    return tuple(Same() if place is None else Rows(place) for place in places)


def _reshaped(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of a reshape: the number of blocks of the batch before the rows, in the flattened index, stays the same.

        (3, batch)    Rows(1)       ->   (3 * batch,)   Rows(0, before=3)
        (batch, 3)    Rows(0)       ->   (3 * batch,)   Rows(0)

    By the rule alone these two results are equal.
    """
    role, old_shape, new_shape = roles[0], call.operands[0].shape, call.results[0]
    dimension = batch_dimension(new_shape, batch)
    if not isinstance(role, Rows) or dimension is None or 0 in old_shape:
        return roles_by_rule(call, [role, *[Same()] * (len(roles) - 1)], batch)  # of a second operand, only sizes are read
    blocks = math.prod(old_shape[: role.dimension], start=role.before)
    outer = math.prod(new_shape[:dimension], start=1)
    if depends_on(batch, (blocks, outer)) or blocks % outer:
        return None
    inside, multiple = int(blocks // outer), new_shape[dimension] / batch
    return (Rows(dimension, inside),) if multiple.is_Integer and int(multiple) % inside == 0 else None


def _squeezed(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of a squeeze, which never removes the batch: only dimensions of constant size 1 are removed."""
    shape, dim = call.operands[0].shape, call.get("dim")
    all_dims = tuple(range(len(shape)))
    dims = all_dims if dim is None else dim if isinstance(dim, tuple) else (dim,)
    ones = tuple(dim for dim in dims if shape and shape[dim] == 1)
    return roles_by_rule(_with(call, dim=ones), roles, batch) if ones else (roles[0],)


def _made_like(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of ``zeros_like`` and the like, which read only sizes: row numbers count as rows, totals as constants."""
    role = roles[0]
    if isinstance(role, RowNumbers):
        role = Rows(role.dimension)
    elif isinstance(role, Total):
        role = Same()
    return roles_by_rule(call, [role], batch)


def _expanded(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of ``expand_as``, which reads only the sizes of its second operand."""
    return roles_by_rule(call, [roles[0], Same()], batch)


def _row_numbers(call: Call, _roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return RowNumbers for ``arange(batch)``."""
    counts = call["end"] == batch and call.get("start", 0) == 0 and call.get("step", 1) == 1
    return (RowNumbers(0),) if counts else None


def _indexed(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of ``x[arange(batch), ...]``: row numbers index the rows of ``x``, so they count as the rows."""
    source, indices = call.operands[0], call["indices"]
    tensors = {dim: index for dim, index in enumerate(indices) if isinstance(index, Operand)}
    numbered = [dim for dim, index in tensors.items() if isinstance(roles[index.index], RowNumbers)]
    if len(numbered) != 1 or roles[0] != Rows(numbered[0]) or source.shape[numbered[0]] != batch:
        return None
    if any(index.dtype in (torch.bool, torch.uint8) for index in tensors.values()):
        return None
    as_rows = (Rows(role.dimension) if isinstance(role, RowNumbers) else role for role in roles[1:])
    return roles_by_rule(call, [Same(), *as_rows], batch)


def _scaled(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of a sum over the batch divided by its size, a mean, or of a mean times the size, a sum."""
    number, divides = call["other"], "div" in call.operator.name()
    if isinstance(number, Operand) or not isinstance(roles[0], Total) or not depends_on(batch, number) or call.get("rounding_mode"):
        return None
    factor = 1 / number if divides else number
    if roles[0] == Total("sum") and not depends_on(batch, factor * batch):
        return (Total("mean"),)
    return (Total("sum"),) if roles[0] == Total("mean") and not depends_on(batch, factor / batch) else None


def _shifted(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of a mean over rows to which a number is added, or that is padded with one: a mean again. None: the rule decides.

    The role is that with the number 0, for which the rule is linear. The number is ``self`` in ``sub.Tensor(1.0, mean)``, ``value`` in a
    padding, else ``other``.
    """
    numbers = [name for name in ("other", "self", "value") if not isinstance(call.get(name), Operand | None)]
    if list(roles) != [Total("mean")] or not numbers or depends_on(batch, call[numbers[0]]):
        return None
    return roles_by_rule(_with(call, **{numbers[0]: 0}), roles, batch)


def _counted(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of a mean loss over class targets: it divides by the weighted count of targets that are not ignored."""
    if call["reduction"] != MEAN or call.operand("target").known_dtype.is_floating_point:
        return None
    summed = roles_by_rule(_with(call, reduction=SUM), roles, batch)
    return (Total("mean", counted=True),) if summed == (Total("sum"),) else None


def _keeps_counted_mean(call: Call, roles: Sequence[Role]) -> bool:
    """Return whether ``passes.spmd.mean_to_sum`` can rewrite a call whose result is a mean over counted targets by its rule.

    It can rewrite the loss itself, and a sum, a multiple, and a copy of such means. ``roles``: of all tensor operands. A factor is a number
    or equal for all rows, or the rule would not be linear.
    """
    totals = sum(isinstance(role, Total) for role in roles)
    if not totals:
        return call.operator in COUNTED_LOSSES
    if call.operator in MEANS_ADDED:
        return len(roles) == 2 or call["other"] == 0
    return call.operator in MEANS_SCALED | MEANS_KEPT and totals == 1


def _normalised(call: Call, roles: Sequence[Role], batch: sympy.Symbol) -> Roles | None:
    """Return the role of a normalisation over the batch: rows; its statistics are those of each microbatch (see ``RowMixing``)."""
    flag = "training" if "training" in call.arguments else "use_input_stats"
    if not call[flag] or (flag == "use_input_stats" and call["running_mean"] is None):
        return None
    results = roles_by_rule(_with(call, **{flag: False}), roles, batch)
    return results if results and isinstance(results[0], Rows) and results[0].dimension == 0 else None


def _averaged(_call: Call, roles: Sequence[Role], _batch: sympy.Symbol) -> Roles | None:
    """Return the role of statistics that are averaged over batches: over microbatches, too, each of which is normalised by its own."""
    return (Total("mean"),) if roles[0] == Rows(0) else None


EXCEPTIONS: Mapping[Any, _Exception] = {
    **{operator: _reshaped for operators in RESHAPES.values() for operator in operators},
    **dict.fromkeys((aten.mul, aten.multiply, aten.div, aten.divide, aten.true_divide), _scaled),
    **dict.fromkeys((each.overloadpacket for each in COUNTED_LOSSES), _counted),
    **dict.fromkeys((aten.add, aten.constant_pad_nd, aten.pad, aten.rsub, aten.sub), _shifted),
    **dict.fromkeys((aten.empty_like, aten.full_like, aten.ones_like, aten.zeros_like), _made_like),
    **dict.fromkeys((aten.rand_like, aten.randint_like, aten.randn_like), _made_like),
    aten.arange: _row_numbers,
    aten.batch_norm: _normalised,
    channel_statistics: _averaged,
    aten.expand_as: _expanded,
    aten.index: _indexed,
    aten.instance_norm: _normalised,
    aten.squeeze: _squeezed,
}
"""Operator, or one of its overloads -> its roles where the rule does not decide."""
