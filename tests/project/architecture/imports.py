"""Imports of a file, one entry a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.project.architecture.source_tree import Source


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        module: the module named by the statement: ``"passes.ir"`` in ``from passes.ir import plan``.
        name: what is taken from it; None in ``import passes.ir``.
        node: the statement.
    """

    module: str
    name: str | None
    node: ast.stmt

    @property
    def full_name(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"

    @property
    def distribution(self) -> str:
        """The top-level package."""
        return self.module.split(".")[0]


def imports_of(source: Source) -> Iterator[Import]:
    """Yield every import, also inside functions and under TYPE_CHECKING."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(node.module or "", alias.name, node)


def dotted_names(source: Source) -> Iterator[tuple[str, ast.Attribute]]:
    """Yield every complete ``a.b.c`` in the code that starts at a plain name."""
    inner = {id(node.value) for node in source.nodes if isinstance(node, ast.Attribute)}
    for node in source.nodes:
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        parts = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name):
            yield ".".join([value.id, *reversed(parts)]), node
