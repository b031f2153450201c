"""The files around the code agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.project.architecture.source_tree import PACKAGES, ROOT, report

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_holds_the_three_packages() -> None:
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)


def test_every_dependency_is_pinned() -> None:
    metadata = PROJECT["project"]
    groups = [PROJECT["build-system"]["requires"], metadata["dependencies"], *metadata["optional-dependencies"].values()]
    requirements = [requirement for group in groups for requirement in group]
    pinned = {canonical(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    names = {canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in requirements} - {metadata["name"]}
    offences = [f"constraints.txt:1: {name}" for name in sorted(names - pinned)]
    assert not offences, report(offences, "pin the version that the tests ran with")


def test_the_workflow_runs_every_python_of_the_metadata() -> None:
    metadata, workflow = PROJECT["project"], (ROOT / ".github/workflows/test.yml").read_text()
    named = [each for entry in metadata["classifiers"] for each in re.findall(r"^Programming Language :: Python :: (3\.\d+)$", entry)]
    (matrix,) = re.findall(r"python-version: \[(.*)\]", workflow)
    assert re.findall(r"3\.\d+", matrix) == named
    assert metadata["requires-python"] == f">={named[0]}"
    assert "PYTHON: python${{ matrix.python-version }}" in workflow
    assert re.search(r"^PYTHON +\?= ", (ROOT / "Makefile").read_text(), re.MULTILINE)  # an environment variable overrides it


@pytest.mark.parametrize(
    ("which", "pin"), [("oldest", "torch=={oldest}.*"), ("newest", "torch<{end}"), ("nightly", "torch>={oldest}.dev0")]
)
def test_the_weekly_workflow_runs_the_bounds_of_torch(which: str, pin: str, tmp_path: Path) -> None:
    workflow, script = (ROOT / ".github/workflows/weekly.yml").read_text(), ROOT / ".ci/choose-torch"
    (matrix,) = re.findall(r"torch: \[(.*)\]", workflow)
    assert matrix.split(", ") == ["oldest", "newest", "nightly"]
    assert ".ci/choose-torch ${{ matrix.torch }}" in workflow
    (tmp_path / ".ci").mkdir()
    for file in (script, ROOT / "pyproject.toml", ROOT / "constraints.txt"):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    subprocess.run([tmp_path / ".ci/choose-torch", which], check=True, capture_output=True)
    (bounds,) = (each for each in PROJECT["project"]["dependencies"] if each.startswith("torch>"))
    oldest, end = re.findall(r"[\d.]+", bounds)
    pins = [line for line in (tmp_path / "constraints.txt").read_text().splitlines() if re.match("torch[=<>]", line)]
    assert pins == [pin.format(oldest=oldest, end=end)]
    changed = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["dependencies"][0]
    assert changed == (f"torch>={oldest}.dev0" if which == "nightly" else bounds)


def test_torch_is_pinned_without_a_build() -> None:
    """``torch==2.13.0`` takes the CPU build and the CUDA build; ``+cpu`` would take one alone."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    offences = [f"constraints.txt:{number}: {line}" for number, line in enumerate(lines, start=1) if re.match(r"torch==.*\+", line)]
    assert not offences, report(offences, "pin the bare version")


def test_commands_that_the_texts_name_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [
        "README.md",
        "CONTRIBUTING.md",
        ".ci/run",
        ".pre-commit-config.yaml",
        ".github/workflows/test.yml",
        ".github/workflows/weekly.yml",
    ]
    offences = [
        f"{path}:{number}: make {target}"
        for path in texts
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1)
        for target in re.findall(r"(?:`|: |^|=> ?)make ([a-z0-9-]+)", line)
        if target not in targets
    ]
    assert not offences, report(offences, "the Makefile has no such target")


def canonical(name: str) -> str:
    """Return a distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_files_named_in_the_pages_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = re.compile(rf"`((?:{'|'.join((*PACKAGES, 'tests', 'examples', 'benchmarks', 'docs'))})/[\w./-]*\w)`")
    modules = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")
    lost = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        lost += [f"{page.name}: {path}" for path in named.findall(text) if not ((ROOT / path).exists() or (ROOT / f"{path}.py").exists())]
        for name in (each for each in modules.findall(text) if not each.endswith(".default")):  # an operator of torch.ops is no module
            parent = ROOT.joinpath(*name.split(".")[:-1])  # the last word may be a module, or a name in one
            if not parent.exists() and not parent.with_suffix(".py").exists() and not parent.parent.with_suffix(".py").exists():
                lost.append(f"{page.name}: {name}")
    assert not lost, report(lost, "name the file where it is now: git log --follow")
