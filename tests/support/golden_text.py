"""Texts that are kept in ``tests/support/golden`` and compared letter by letter.

After a wanted change, write them again and read the difference before committing it:

    python -m pytest tests -k golden --update-golden; git diff tests/support/golden
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Golden"]

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
        path = FOLDER / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if self.update:
            path.write_text(text, encoding="utf-8")
            return
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != kept:
            lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), f"tests/support/golden/{path.name}", "now", lineterm="")
            pytest.fail("\n".join([*lines, "", "if this is wanted: python -m pytest tests -k golden --update-golden"]))
