"""A file is one concept, a function is one step: neither grows without end."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.project.architecture.source_tree import PACKAGES, ROOT, report, sources

FILE_LINES = 700
FUNCTION_LINES = 60
FOLDER_ENTRIES = 12


def test_files_are_short() -> None:
    lengths = {source.path: len(source.text.splitlines()) for source in sources()}
    offences = [f"{path}:{FILE_LINES + 1}: {length} lines" for path, length in lengths.items() if length > FILE_LINES]
    assert not offences, report(offences, f"a file is as long as its concept; split it in two: the limit is {FILE_LINES} lines")


def test_folders_are_read_at_a_glance() -> None:
    roots = [ROOT / name for name in (*PACKAGES, "tests")]
    folders = [folder for root in roots for folder in (root, *root.rglob("*")) if folder.is_dir() and folder.name != "__pycache__"]
    counts = {folder: sum(is_entry(path) for path in folder.iterdir()) for folder in folders}
    offences = [f"{folder.relative_to(ROOT)}: {count} entries" for folder, count in counts.items() if count > FOLDER_ENTRIES]
    assert not offences, report(offences, f"a folder is a phase or a part of one; the limit is {FOLDER_ENTRIES} files and folders")


def is_entry(path: Path) -> bool:
    """Return whether a folder's reader sees it: not a package marker, a ``__main__`` or a cache of Python."""
    return path.name not in {"__init__.py", "__main__.py", "__pycache__", "py.typed"}


def test_functions_are_short() -> None:
    offences = []
    for source in sources():
        functions = (node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        lengths = {node: function_length(node) for node in functions}
        offences += [f"{source.at(node)}: {node.name} has {length} lines" for node, length in lengths.items() if length > FUNCTION_LINES]
    remedy = f"name the steps and make each a function; the limit is {FUNCTION_LINES} lines without the docstring"
    assert not offences, report(offences, remedy)


def function_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count lines from ``def`` to the end, without the docstring (explaining more must cost nothing), with comments and blank lines."""
    first = function.body[0]
    is_docstring = ast.get_docstring(function, clean=False) is not None
    assert function.end_lineno is not None
    assert first.end_lineno is not None
    return function.end_lineno - function.lineno + 1 - (first.end_lineno - first.lineno + 1 if is_docstring else 0)


def test_docstrings_do_not_count() -> None:
    function = ast.parse('def f(\n    x: int,\n) -> int:\n    """One.\n\n    Two.\n    """\n\n    # why\n    return x\n').body[0]
    assert isinstance(function, ast.FunctionDef)
    assert function_length(function) == 6
