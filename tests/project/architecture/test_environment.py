"""No behaviour comes from environment variables, torchrun's own aside."""

from __future__ import annotations

import ast
import re

from tests.project.architecture.imports import imports_of
from tests.project.architecture.source_tree import package_sources, report, sources

TORCHRUN = "partitioner/runtime/torchrun.py"
SCRIPTS = ("examples/", "benchmarks/")
TORCHRUN_VARIABLES = re.compile("WORLD_SIZE|RANK|LOCAL_WORLD_SIZE|LOCAL_RANK|MASTER_[A-Z]+|TORCHELASTIC_[A-Z_]+")

ACCESS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def test_the_packages_read_the_environment_in_one_file() -> None:
    offences = [
        f"{source.at(node)}: {ast.unparse(node)}"
        for source in package_sources()
        if source.path != TORCHRUN
        for node in ast.walk(source.tree)
        if is_access(node)
    ]
    assert not offences, report(offences, f"make it an argument; what torchrun sets is read in {TORCHRUN}")


def test_what_is_read_is_what_torchrun_sets() -> None:
    """Holds for that file and for scripts, which are started by torchrun themselves."""
    offences = [
        f"{source.at(node)}: {ast.unparse(node)}"
        for source in sources()
        if source.path == TORCHRUN or source.path.startswith(SCRIPTS)
        for node in ast.walk(source.tree)
        if (key := variable(node)) is not None and not TORCHRUN_VARIABLES.fullmatch(key)
    ]
    assert not offences, report(offences, f"read {TORCHRUN_VARIABLES.pattern} by literal name; anything else is an argument")


def test_the_environment_is_reached_by_its_full_name() -> None:
    """Otherwise the other rules would not see it."""
    offences = [
        f"{source.at(found.node)}: {found.full_name}"
        for source in sources()
        for found in imports_of(source)
        if found.module == "os" and found.name in ACCESS
    ]
    assert not offences, report(offences, "write import os, and os.environ where it is read")


def is_access(node: ast.AST) -> bool:
    """Whether a node is ``os.environ`` or a twin of it."""
    return isinstance(node, ast.Attribute) and node.attr in ACCESS and ast.unparse(node.value) == "os"


def variable(node: ast.AST) -> str | None:
    """The variable that an expression reads, ``"?"`` when it is no literal; None when it reads none."""
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript) and is_access(node.value):
        key = node.slice
    elif isinstance(node, ast.Compare) and any(is_access(side) for side in node.comparators):
        key = node.left
    elif (
        isinstance(node, ast.Call)
        and node.args
        and isinstance(node.func, ast.Attribute)
        and (is_access(node.func) or is_access(node.func.value))
    ):
        key = node.args[0]
    if key is None:
        return None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else "?"


def test_which_variable_is_read() -> None:
    read = {
        'os.environ["RANK"]': "RANK",
        'os.environ.get("WORLD_SIZE", "1")': "WORLD_SIZE",
        'os.getenv("DEBUG")': "DEBUG",
        '"MASTER_ADDR" in os.environ': "MASTER_ADDR",
        "os.environ[name]": "?",
        "settings[name]": None,
    }
    assert {text: variable(ast.parse(text, mode="eval").body) for text in read} == read
