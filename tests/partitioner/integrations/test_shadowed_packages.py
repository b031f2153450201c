"""A folder or file of a script with the name of one of the packages is named in an error, and so is what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SHADOWS = {"folder": "{0}/__init__.py", "file": "{0}.py"}
NAMES = ["passes", "cost_models"]
WHY = "Python finds it first, by the order of sys.path"


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, where Python looks first; the checkout comes after it."""
    (folder / "train.py").write_text(script)
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def shadow(folder: Path, name: str, kind: str) -> Path:
    """Create a module of this name; return the folder or file that shadows."""
    path = folder / SHADOWS[kind].format(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("value = 1\n")
    return path if kind == "file" else path.parent


@pytest.mark.parametrize("kind", SHADOWS)
@pytest.mark.parametrize("name", NAMES)
def test_a_shadowed_package(tmp_path: Path, name: str, kind: str) -> None:
    found = shadow(tmp_path, name, kind)
    ended = run(tmp_path, "import partitioner")
    last = ended.stderr.splitlines()[-2:]
    assert last == [
        f"ImportError: {found} shadows the package {name!r} of partitioner, in {ROOT / name}: {WHY}",
        f"  remedy: rename {found}, or start the script from a file in another folder",
    ]


def test_a_package_that_the_script_has_imported(tmp_path: Path) -> None:
    found = shadow(tmp_path, "passes", "folder")
    (found / "ir.py").write_text("")
    ended = run(tmp_path, "import sys, passes.ir\nsys.path.pop(0)\nimport partitioner")
    assert f"{found} shadows the package 'passes' of partitioner" in ended.stderr
    assert "Python finds it first, by the script or an earlier import" in ended.stderr


@pytest.mark.parametrize("kind", SHADOWS)
def test_the_name_of_the_whole(tmp_path: Path, kind: str) -> None:
    """Nothing of ours runs, and Python's own error names the file."""
    shadow(tmp_path, "partitioner", kind)
    ended = run(tmp_path, "from partitioner import partition")
    assert "ImportError: cannot import name 'partition' from 'partitioner'" in ended.stderr
    assert str(tmp_path / SHADOWS[kind].format("partitioner")) in ended.stderr


def test_a_folder_without_a_package_shadows_nothing(tmp_path: Path) -> None:
    for name in (*NAMES, "partitioner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("")
    ended = run(tmp_path, "import partitioner, passes\nprint(partitioner.__file__, passes.__file__)")
    assert ended.stdout.split() == [str(ROOT / name / "__init__.py") for name in ("partitioner", "passes")], ended.stderr
