"""A reader of the code follows a call: the walk to its programs stays short, and a call that was traced before enters no tracer."""

from __future__ import annotations

import pytest

from tests.project.walks import Walk, walks

FILES = {"train_step, found": 30, "call, found": 30}


@pytest.fixture(scope="module")
def found() -> dict[str, Walk]:
    return walks()


@pytest.mark.parametrize("name", FILES)
def test_a_call_enters_few_files(found: dict[str, Walk], name: str) -> None:
    assert len(found[name].files) <= FILES[name], found[name].files
