"""The changelog is short: one line a change, the name of the API first."""

from __future__ import annotations

import re

import pytest

from tests import ROOT

WORDS_A_LINE = 20
LINES_OF_FIRST_RELEASE = 60
KINDS_OF_NEW_CHANGES = ["Added", "Changed", "Fixed", "Breaking"]

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASES = dict(re.findall(r"^## \[([\w.]+)\][^\n]*\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
CHANGES = re.findall(r"^- .*$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_a_line_of_few_words(change: str) -> None:
    assert len(change.removeprefix("- ").split()) <= WORDS_A_LINE
    assert ": " in change, "begin with the name of the API and a colon"


def test_each_line_is_a_change_or_a_title() -> None:
    lines = [line for release in RELEASES.values() for line in release.splitlines() if line]
    assert [line for line in lines if not line.startswith(("- ", "### "))] == []


def test_the_first_release_is_an_overview() -> None:
    assert len(RELEASES["0.1.0"].splitlines()) < LINES_OF_FIRST_RELEASE


def test_new_changes_are_sorted_by_kind() -> None:
    kinds = re.findall(r"^### (.*)$", RELEASES["Unreleased"], re.MULTILINE)
    assert kinds == [kind for kind in KINDS_OF_NEW_CHANGES if kind in kinds]
