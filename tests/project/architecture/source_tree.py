"""The project's files, read once."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

__all__ = [
    "PACKAGES",
    "ROOT",
    "Source",
    "package_sources",
    "report",
    "sources",
    "text_files",
]

PACKAGES = ("partitioner", "cost_models", "passes")
"""The product, top layer first."""

_FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks")
_HIDDEN_BUT_OURS = {".ci", ".github", ".gitignore", ".pre-commit-config.yaml"}
_BUILT = {"__pycache__", "build", "dist"}


@dataclass(frozen=True)
class Source:
    """One Python file.

    Attributes:
        path: from the root, with forward slashes: ``"passes/ir/plan.py"``.
        text: its content.
        tree: its syntax.
    """

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name: ``passes.ir.plan``; a package is named by its folder."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of its syntax, which each rule looks through."""
        return tuple(ast.walk(self.tree))

    def at(self, node: ast.AST) -> str:
        """Return a node's place, as editors and terminals link it."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@functools.cache
def sources() -> tuple[Source, ...]:
    """Return every Python file of packages, tests, examples and benchmarks."""
    paths = sorted(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return tuple(_read(path) for path in paths)


def package_sources() -> tuple[Source, ...]:
    """Return every Python file of the three packages."""
    return tuple(source for source in sources() if source.path.split("/")[0] in PACKAGES)


@functools.cache
def text_files() -> tuple[tuple[str, str], ...]:
    """Path from the root and content of every text file that a reader of the repository sees."""
    seen = [path for path in ROOT.iterdir() if not path.name.startswith(".") or path.name in _HIDDEN_BUT_OURS]
    return tuple(sorted(_texts(seen)))


def _texts(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        if path.is_dir():
            if path.name not in _BUILT:
                yield from _texts(path.iterdir())
            continue
        with contextlib.suppress(UnicodeDecodeError):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def report(offences: list[str], remedy: str) -> str:
    """Return the message of a failed rule: every place, one a line, then the remedy."""
    return "\n".join(["", *offences, f"-> {remedy}"])


def _read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path.relative_to(ROOT).as_posix(), text, ast.parse(text, filename=str(path)))
