"""Modules that an import, or the help of a command, may load."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import partitioner
from partitioner.api import partition as implemented

HEAVY = ("torch", "sympy", "numpy")


def loaded_by(code: str) -> list[str]:
    """Return the modules that a fresh interpreter has loaded when it has run some code."""
    run = subprocess.run([sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("code", ["import partitioner", "from partitioner import partition", "import partitioner.cli"])
def test_names_are_imported_when_they_are_used(code: str) -> None:
    assert not set(HEAVY).intersection(loaded_by(code))


def test_descriptions_of_hardware_need_no_formulas() -> None:
    loaded = loaded_by("from partitioner import Cluster, Constraints, Device, Link, Plan")
    assert not {"sympy", "torch.fx.experimental.symbolic_shapes", "partitioner.api"}.intersection(loaded)


def test_partition_has_the_signature_of_what_it_imports() -> None:
    assert inspect.signature(partitioner.partition) == inspect.signature(implemented)


def test_help_needs_no_torch() -> None:
    code = "from partitioner.cli import main\ntry:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass"
    assert not set(HEAVY).intersection(loaded_by(code))


@pytest.mark.slow
def test_partition_imports_nothing_of_checkpoints() -> None:
    code = "import torch\nimport partitioner.api"
    assert not [name for name in loaded_by(code) if name.startswith("torch.distributed.checkpoint")]


def test_a_name_is_imported_from_where_the_types_say() -> None:
    modules = {name: module for module, names in partitioner._NAMES.items() for name in names}
    tree = ast.parse(Path(partitioner.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = {name.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert modules.items() <= imports.items()
    assert sorted([*modules, "partition"]) == sorted(partitioner.__all__) == sorted(dir(partitioner))
    for name in modules:
        assert getattr(partitioner, name) is getattr(sys.modules[modules[name]], name)


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'partitioner' has no attribute 'partitions'"):
        partitioner.partitions  # noqa: B018
