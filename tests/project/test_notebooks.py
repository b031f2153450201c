"""The notebooks run, and show what they showed when they were written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    specification = importlib.util.spec_from_file_location("docs_notebooks", DOCS / "notebooks.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    written: dict[str, Any] = module.executed(notebook)
    return written


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_shows_now(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = json.loads(path.read_text(encoding="utf-8"))
    shown = [cell["outputs"] for cell in kept["cells"] if cell["cell_type"] == "code"]
    assert any(shown)
    found = [cell["outputs"] for cell in execute(kept)["cells"] if cell["cell_type"] == "code"]
    assert found == shown, "python docs/notebooks.py writes what they show now"


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert notebook["nbformat"] == 4
        assert all(cell["cell_type"] in ("code", "markdown") for cell in notebook["cells"])
