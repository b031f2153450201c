"""One operation as a rule sees it: named arguments, roles and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
from torch import fx

from passes.analysis.batch.role import Mixed, Role, Rows, Same
from passes.graph.schemas import node_leaves

__all__ = ["Call", "Shape", "Size"]

Size: TypeAlias = "int | sympy.Expr"
"""A number, or an expression in the batch size."""

Shape: TypeAlias = tuple[Size, ...]
"""The sizes of one tensor."""


@dataclass(frozen=True)
class Call:
    """One node, with everything that a rule may ask.

    Attributes:
        node: the node.
        arguments: the operator's parameters by name; numbers that depend on the batch alone are expressions, all others nodes.
        roles: of the nodes in front.
        shapes: of the nodes in front that are tensors or numbers; a number has ``()``.
        results: the shapes of the results.
        batch: the symbol of the batch size.
    """

    node: fx.Node
    arguments: Mapping[str, Any]
    roles: Mapping[fx.Node, Any]
    shapes: Mapping[fx.Node, Any]
    results: tuple[Shape, ...]
    batch: sympy.Symbol

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def mixed(self) -> Mixed:
        """The answer that the rows meet here."""
        return Mixed(self.node)

    @property
    def operands(self) -> list[fx.Node]:
        """Every node in the arguments."""
        return node_leaves(list(self.arguments.values()))

    def role(self, node: fx.Node) -> Role:
        found = self.roles[node]
        return found if not isinstance(found, tuple) else Mixed(node)

    def rank(self, node: fx.Node) -> int:
        return len(self.shapes[node])

    def depends_on_batch(self, value: Any) -> bool:
        """Whether a number, or one in a list, depends on the batch size."""
        if isinstance(value, list | tuple):
            return any(self.depends_on_batch(part) for part in value)
        return isinstance(value, sympy.Expr) and self.batch in value.free_symbols

    def aligned(self, dimensions: Mapping[fx.Node, Sequence[int | None]]) -> Role:
        """The role of a result whose dimensions are dimensions of the operands.

        Args:
            dimensions: operand -> for each of its dimensions, that of the result which runs with it; None when all of it is needed for
                every element of the result. Operands that are left out must be the same in every microbatch.
        """
        found: set[Rows] = set()
        for operand in self.operands:
            role = self.role(operand)
            if isinstance(role, Same):
                continue
            if not isinstance(role, Rows) or operand not in dimensions:
                return self.mixed
            target = dimensions[operand][role.dimension]
            if target is None:
                return self.mixed
            found.add(Rows(target, role.before))
        if not found:
            return Same()
        return found.pop() if len(found) == 1 else self.mixed

    def from_the_right(self, operand: fx.Node, rank: int | None = None) -> list[int | None]:
        """Dimensions of the result that an operand runs with when shapes are aligned at their ends (broadcasting)."""
        rank = len(self.results[0]) if rank is None else rank
        return [index + rank - self.rank(operand) for index in range(self.rank(operand))]

    def leading(self, operand: fx.Node, consumed: int) -> list[int | None]:
        """Every dimension of an operand runs with that of the result, but for the last few."""
        rank = self.rank(operand)
        return [index if index < rank - consumed else None for index in range(rank)]

    def dimension(self, operand: fx.Node, dimension: int) -> int:
        """A dimension counted from the front."""
        return int(dimension) % max(self.rank(operand), 1)
