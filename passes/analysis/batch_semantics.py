"""Follow the batch through a graph: what becomes of every result when the batch is cut into microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from passes.analysis.batch.call import Call, Shape
from passes.analysis.batch.from_loops import by_loops
from passes.analysis.batch.role import Mixed, Role, RowNumbers, Rows, Same, Total
from passes.analysis.batch.table import reads_sizes, rule_of
from passes.analysis.batch.values import Values
from passes.analysis.row_statistics import takes_row_statistics
from passes.graph.provenance import module_path, place_of
from passes.ir.graph import Combine, RowMixing
from passes.ir.torch_private import OpOverload
from passes.rules.registry import rule_of as sharding_rule_of

__all__ = ["BatchFlow", "combination", "follow_batch"]


@dataclass(frozen=True)
class BatchFlow:
    """What a graph does to the rows of its batch.

    Attributes:
        roles: node -> its role; several for a node that gives unlike tensors.
        values: where sizes and numbers were read.
        mixing: where rows are mixed outside of the results: statistics of normalisations.
    """

    roles: Mapping[fx.Node, Role | tuple[Role, ...]]
    values: Values
    mixing: RowMixing


def follow_batch(graph: fx.Graph, values: Values, batched: Mapping[str, int], countable: Collection[str]) -> BatchFlow:
    """The role of every value of a graph.

    Args:
        values: its sizes and numbers.
        batched: input placeholder -> the dimension that holds the batch.
        countable: nodes that follow from the inputs alone, so that targets among them can be counted over the whole batch.
    """
    walk = _Walk(values, batched, countable)
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function"):
            walk.visit(node)
    return BatchFlow(walk.roles, values, walk.mixing())


def combination(node: fx.Node, flow: BatchFlow) -> tuple[Combine, int | None, str | None]:
    """What to do with a result over microbatches, the dimension to concatenate over, and why nothing can be done with it."""
    number = flow.values.number(node)
    if number is not None:
        if not isinstance(number, sympy.Expr):
            return "same", None, None
        return ("sum", None, None) if not (number / flow.values.batch).free_symbols else ("mixed", None, _why(node))
    role = flow.roles[node]
    if isinstance(role, Rows) and role.before == 1:
        return "concatenate", role.dimension, None
    if isinstance(role, Same):
        return "same", None, None
    if isinstance(role, Total):
        return role.kind, None, None
    return "mixed", None, _why(role.node if isinstance(role, Mixed) else node)


def _why(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload) and rule_of(node.target) is None and sharding_rule_of(node.target) is None:
        return f"no rule says what becomes of the rows of the batch in {place_of(node)}, and register_rule can"
    return f"rows of the batch meet in {place_of(node)}"


class _Walk:
    """One pass over the nodes, in order."""

    def __init__(self, values: Values, batched: Mapping[str, int], countable: Collection[str]) -> None:
        self.roles: dict[fx.Node, Any] = {}
        self._values = values
        self._batched = batched
        self._countable = countable
        self._shapes: dict[fx.Node, Any] = {}
        self._normalizations: dict[str, None] = {}

    def visit(self, node: fx.Node) -> None:
        shapes = self._values.shapes(node)
        self._shapes[node] = shapes[0] if len(shapes) == 1 else shapes
        self.roles[node] = self._role(node, shapes)

    def mixing(self) -> RowMixing:
        """Where rows have been mixed outside of the results."""
        return RowMixing(tuple(self._normalizations))

    def _role(self, node: fx.Node, shapes: tuple[Shape, ...]) -> Role | tuple[Role, ...]:
        if node.op == "placeholder":
            return Rows(self._batched[node.name]) if node.name in self._batched else Same()
        if self._values.number(node) is not None:
            return Same()
        sources = node.all_input_nodes
        mixed = next((role for source in sources for role in _each(self.roles[source]) if isinstance(role, Mixed)), None)
        if mixed is not None:
            return mixed
        if not isinstance(node.target, OpOverload):
            return self._of_python(node, sources)
        return self._of_operation(node, shapes)

    def _of_python(self, node: fx.Node, sources: list[fx.Node]) -> Role:
        """Items of lists, and arithmetic on numbers that values decide."""
        role = self.roles[sources[0]] if sources else Same()
        if getattr(node.target, "__name__", "") == "getitem":
            return role[node.args[1]] if isinstance(role, tuple) else role  # type: ignore[index]
        return Same() if all(self.roles[source] == Same() for source in sources) else Mixed(node)

    def _of_operation(self, node: fx.Node, shapes: tuple[Shape, ...]) -> Role | tuple[Role, ...]:
        arguments = self._values.arguments(node)
        call = Call(node, arguments, self.roles, self._shapes, shapes, self._values.batch)
        unaffected = not any(call.depends_on_batch(value) for value in (*arguments.values(), *shapes))
        if unaffected and all(isinstance(self.roles[operand], Same) for operand in call.operands):
            return Same()
        rule = rule_of(node.target) or by_loops
        if not (reads_sizes(rule) or not any(call.depends_on_batch(value) for value in arguments.values())):
            return call.mixed
        role = rule(call)
        if isinstance(role, Mixed):
            role = by_loops(call)
        if isinstance(role, Total) and role.counted and not self._is_countable(call):
            return call.mixed
        if not all(_fits(each, shape, call) for each, shape in _paired(role, shapes)):
            return call.mixed
        if takes_row_statistics(node) and not isinstance(role, Same):
            self._normalizations[module_path(node)] = None
        return role

    def _is_countable(self, call: Call) -> bool:
        """Whether the targets of a loss are known before the batch is cut."""
        known = [call.get("target"), call.get("weight")] if "target" in call.arguments else []
        return all(part.name in self._countable for part in known if isinstance(part, fx.Node))


def _each(role: Any) -> tuple[Role, ...]:
    return role if isinstance(role, tuple) else (role,)


def _paired(role: Any, shapes: tuple[Shape, ...]) -> list[tuple[Role, Shape]]:
    roles = role if isinstance(role, tuple) else (role,) * len(shapes)
    return list(zip(roles, shapes, strict=True))


def _fits(role: Role, shape: Shape, call: Call) -> bool:
    """Whether sizes agree with a role: the batch is in its dimension, as a multiple of the batch size, and in no other."""
    found = [dimension for dimension, size in enumerate(shape) if call.depends_on_batch(size)]
    if isinstance(role, Rows | RowNumbers):
        if found != [role.dimension]:
            return False
        multiple = shape[role.dimension] / call.batch
        before = role.before if isinstance(role, Rows) else 1
        return bool(multiple.is_Integer) and int(multiple) % before == 0
    return isinstance(role, Mixed) or not found
