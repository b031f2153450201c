"""A reader of the code follows a call: the walk to its programs stays short, and a call that was traced before enters no tracer."""

from __future__ import annotations

import pytest

from tests import ROOT
from tests.project.walks import Walk, walks

FILES = {"train_step, found": 8, "call, found": 11}


@pytest.fixture(scope="module")
def found() -> dict[str, Walk]:
    return walks()


@pytest.mark.parametrize("name", FILES)
def test_a_call_enters_few_files(found: dict[str, Walk], name: str) -> None:
    assert len(found[name].files) <= FILES[name], found[name].files


def test_the_page_names_the_files_of_a_step(found: dict[str, Walk]) -> None:
    page = (ROOT / "docs" / "one-call.md").read_text(encoding="utf-8")
    missing = [file for file in found["train_step, found"].files if f"`{file}`" not in page]
    assert not missing, f"docs/one-call.md: say what a step does in {', '.join(missing)}"


def test_partition_enters_few_files_beside_the_phases(found: dict[str, Walk]) -> None:
    assert len(found["partition"].outside_phases) <= 60, found["partition"].outside_phases


@pytest.mark.parametrize("name", FILES)
def test_a_call_that_was_traced_before_enters_no_tracer(found: dict[str, Walk], name: str) -> None:
    assert not found[name].traced_files


@pytest.mark.parametrize("name", ["train_step, made", "call, made"])
def test_the_tracer_is_entered_from_few_files(found: dict[str, Walk], name: str) -> None:
    assert len(found[name].callers_of_tracer) <= 2, found[name].callers_of_tracer
