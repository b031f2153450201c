"""No behaviour comes from environment variables, those of torchrun and other launchers aside."""

from __future__ import annotations

import ast
import re

from partitioner.runtime.process.launcher import VARIABLES
from tests.project.architecture.imports import imports_of
from tests.project.architecture.source_tree import package_sources, report, sources

LAUNCHER = "partitioner/runtime/process/launcher.py"
OF_MODELS = "partitioner/tracing/carried/program_state.py"  # compares what the code of a model has read
SCRIPTS = ("examples/", "benchmarks/")
TORCHRUN_VARIABLES = re.compile("WORLD_SIZE|RANK|LOCAL_WORLD_SIZE|LOCAL_RANK|MASTER_[A-Z]+|TORCHELASTIC_[A-Z_]+")
OTHER_LAUNCHERS = {
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
}

ACCESS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def test_the_packages_read_the_environment_in_one_file() -> None:
    offences = [
        f"{source.at(node)}: {ast.unparse(node)}"
        for source in package_sources()
        if source.path not in (LAUNCHER, OF_MODELS)
        for node in source.nodes
        if is_access(node)
    ]
    assert not offences, report(offences, f"make it an argument; what launchers set is read in {LAUNCHER}")


def test_what_is_read_is_what_launchers_set() -> None:
    """Holds for that file, which reads the names of its tables, and for scripts, which are started by torchrun themselves."""
    assert {name for name in VARIABLES if not TORCHRUN_VARIABLES.fullmatch(name)} == OTHER_LAUNCHERS
    offences = [
        f"{source.at(node)}: {ast.unparse(node)}"
        for source in sources()
        if source.path.startswith(SCRIPTS)
        for node in source.nodes
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
    """Return whether a node is ``os.environ`` or a twin of it."""
    return isinstance(node, ast.Attribute) and node.attr in ACCESS and ast.unparse(node.value) == "os"


def variable(node: ast.AST) -> str | None:
    """Return the variable that an expression reads, ``"?"`` when it is no literal; None when it reads none."""
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
