"""Importing torch loads nothing of ours, and what we import or partition changes nothing of other packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.partitioner.integrations.accelerate.training import shared_values
from tests.partitioner.integrations.changes_of_others import CHANGING, changes, state
from tests.partitioner.integrations.transformers.training import few_steps
from tests.support.installation import install, run_installed
from tests.support.processes.processes import Workers

FRAMEWORKS = ("accelerate", "lightning", "lightning.fabric", "transformers", "transformers.trainer")
SCRIPT = ROOT / "tests/partitioner/integrations/changes_of_others.py"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("packages"))


def test_torch_loads_nothing(packages: Path) -> None:
    code = "import torch, sys; assert not [name for name in sys.modules if name.startswith(('partitioner', 'passes', 'cost_models'))]"
    ended = run_installed(packages, "-c", code)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("frameworks", [(), pytest.param(FRAMEWORKS, marks=pytest.mark.slow)], ids=["torch", "all"])
def test_nothing_of_others_changes(packages: Path, frameworks: tuple[str, ...]) -> None:
    ended = run_installed(packages, "-P", str(SCRIPT), *frameworks)
    assert ended.stdout == "nothing changed\n", ended.stdout + ended.stderr


def changed_by_frameworks(folder: str) -> list[str]:
    """Return the changes while our classes train with accelerate and transformers."""
    for name in CHANGING:
        importlib.import_module(name)
    torch.optim.AdamW([torch.zeros(1)])  # torch replaces the step of a class with its first instance
    before = state()
    shared_values()
    few_steps("counted", "fsdp", "global", folder, {})
    return changes(before, state())


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_nothing_of_frameworks_changes_in_processes(workers: Callable[[int], Workers], tmp_path: Path) -> None:
    for changed in workers(2).values(changed_by_frameworks, str(tmp_path), timeout=180):
        assert not changed


@pytest.mark.slow
def test_the_backend_needs_no_import(packages: Path) -> None:
    options = "{'devices': 2, 'mode': 'tensor'}"
    code = f"import torch; print(*torch.compile(torch.nn.Linear(2, 2), backend='partitioner', options={options})(torch.ones(2, 2)).shape)"
    ended = run_installed(packages, "-c", code)
    assert ended.stdout == "2 2\n", ended.stderr


@pytest.mark.parametrize("kind", ["partitioner.py", "partitioner/__init__.py"])
def test_a_file_of_the_same_name_beside_a_script(packages: Path, tmp_path: Path, kind: str) -> None:
    """Only what the script imports is its own."""
    (tmp_path / kind).parent.mkdir(exist_ok=True)
    (tmp_path / kind).write_text("value = 1\n")
    (tmp_path / "train.py").write_text("import torch, partitioner\nprint(torch.ones(1).item(), partitioner.value)\n")
    ended = run_installed(packages, str(tmp_path / "train.py"), folder=tmp_path)
    assert ended.stdout == "1.0 1\n", ended.stderr
