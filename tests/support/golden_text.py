"""Texts that are kept in ``tests/support/golden``, or beside a test, and compared letter by letter.

After a wanted change, write them again and read the difference before committing it:

    python -m pytest tests -k golden --update-golden; git diff tests
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ROOT

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """Compares texts with the kept ones.

    Attributes:
        update: keep the new text instead.
    """

    update: bool

    def __call__(self, name: str, text: str) -> None:
        """Fail with a diff unless ``tests/support/golden/<name>.txt`` is this text."""
        self.compare(FOLDER / f"{name}.txt", text)

    def compare(self, path: Path, text: str) -> None:
        """Fail with a diff unless the file is this text."""
        text = text.rstrip("\n") + "\n"
        if self.update:
            path.write_text(text, encoding="utf-8")
            return
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != kept:
            lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), str(path.relative_to(ROOT)), "now", lineterm="")
            pytest.fail("\n".join([*lines, "", "if this is wanted: python -m pytest tests -k golden --update-golden"]))
