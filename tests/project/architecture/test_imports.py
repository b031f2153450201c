"""Imports point one way, make no cycle, and bring in nothing heavy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib

from tests.project.architecture.imports import imports_of
from tests.project.architecture.source_tree import PACKAGES, ROOT, package_sources, report

BOTTOM = "passes.ir"


def test_layers_and_cycles() -> None:
    """The contracts of ``[tool.importlinter]`` in pyproject.toml."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, report(
        [done.stdout, done.stderr], "move what both sides need down a layer; partitioner -> cost_models -> passes -> passes.ir"
    )


def test_shared_words_import_nothing_above_them() -> None:
    offences = [
        f"{source.at(found.node)}: imports {found.full_name}"
        for source in package_sources()
        if source.module.startswith(BOTTOM)
        for found in imports_of(source)
        if found.distribution in PACKAGES and not found.full_name.startswith(BOTTOM)
    ]
    assert not offences, report(offences, f"{BOTTOM} holds the words that everybody shares: move the word down or the code up")


def test_nobody_imports_from_a_package_that_holds_it() -> None:
    """A name re-exported by ``a/__init__.py`` and used inside ``a`` is a cycle that waits to close."""
    modules = {source.module for source in package_sources()}
    offences = [
        f"{source.at(found.node)}: imports {found.full_name}"
        for source in package_sources()
        if not source.path.endswith("__main__.py")
        for found in imports_of(source)
        if source.module.startswith(f"{found.module}.") and found.full_name not in modules
    ]
    assert not offences, report(offences, "import from the module that defines the name")


def test_importing_needs_the_base_dependencies_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {requirement.split(">")[0].split("=")[0].strip() for requirement in project["dependencies"]}
    allowed = base | set(sys.stdlib_module_names) | set(PACKAGES)
    offences = [
        f"{source.at(found.node)}: imports {found.full_name}"
        for source in package_sources()
        for found in imports_of(source)
        if found.node in source.tree.body and found.distribution not in allowed | framework_of(source.module)
    ]
    assert not offences, report(
        offences, f"base dependencies are {', '.join(sorted(base))}: import an optional one inside the function that needs it"
    )


def framework_of(module: str) -> set[str]:
    """Return the framework that a module inside ``partitioner.integrations.NAME`` integrates, installed when it is imported."""
    parts = module.split(".")
    return {parts[2]} if parts[:2] == ["partitioner", "integrations"] and len(parts) > 3 else set()


def test_imports_are_absolute() -> None:
    offences = [
        f"{source.at(node)}: relative import"
        for source in package_sources()
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not offences, report(offences, "write the whole name: from passes.ir.plan import Plan")
