"""The pages: every block of Python runs and prints what stands below it, every link leads somewhere, every table is that of the code."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "design" not in path.parts)
PER_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))


@dataclass(frozen=True)
class Fence:
    """A block of code in a page.

    Attributes:
        language: after the fence.
        title: the file that it is written to; empty for what is run.
        text: what is in it.
        line: where it stands.
    """

    language: str
    title: str
    text: str
    line: int


def fences(text: str) -> list[Fence]:
    pattern = r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$'
    found = re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    return [Fence(match[1], match[2] or "", match[3], text[: match.start()].count("\n") + 1) for match in found]


@pytest.fixture
def beside_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder to run in, from which the pages' model can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS))
    yield tmp_path
    for name in ("net", "experts"):
        sys.modules.pop(name, None)


QUICK = {"extending"}
"""Pages that always run; the others partition many models, or large ones."""

RUN = [
    pytest.param(page, id=page.stem, marks=[] if page.stem in QUICK else [pytest.mark.slow])
    for page in PAGES
    if "```python" in page.read_text(encoding="utf-8")
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", RUN)
def test_what_a_page_shows_is_what_happens(page: Path, beside_the_model: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = fences(page.read_text(encoding="utf-8"))
    for index, block in enumerate(blocks):
        if block.title:
            (beside_the_model / block.title).write_text(block.text, encoding="utf-8")
        if block.language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)  # noqa: S102  what the page tells readers to do
        following = blocks[index + 1] if index + 1 < len(blocks) else None
        shown = following.text if following is not None and following.language == "text" else ""
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if shown and not doctest.OutputChecker().check_output(shown, printed.getvalue(), flags):
            pytest.fail(f"{page.name}:{block.line} prints\n{printed.getvalue()}\nand the page shows\n{shown}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_readme_runs(beside_the_model: Path) -> None:
    """Its blocks follow each other; files that they name are those of the pages."""
    (beside_the_model / "net.py").write_text((DOCS / "net.py").read_text(encoding="utf-8"), encoding="utf-8")
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in fences(text):
            if block.language == "python":
                exec(compile("\n" * block.line + block.text, "README.md", "exec"), namespace)  # noqa: S102  what it tells readers to do


def test_design_notes_are_few_and_titled_by_subject() -> None:
    notes = sorted((DOCS / "design").glob("*.md"))
    assert len(notes) <= 30
    for note in notes:
        assert note.read_text(encoding="utf-8").startswith(f"# {note.name[:4]}: ")
        test_links_lead_somewhere(note)


@PER_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).is_file(), f"{page.name} links to {target}"


def test_every_page_is_in_the_menu() -> None:
    menu = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"- ([\w/-]+\.md)$", menu, re.MULTILINE))
    assert {str(page.relative_to(DOCS)) for page in PAGES} == listed


@pytest.fixture
def generator(beside_the_model: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("docs_generator", DOCS / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


REMEDY = "python docs/generate.py writes what the code says now"


def test_reference_tables_are_fresh(generator: ModuleType) -> None:
    written = generator.tables()
    assert {path.name for path in (DOCS / "reference").glob("*.md")} <= written.keys(), REMEDY
    assert written == {name: (DOCS / "reference" / name).read_text(encoding="utf-8") for name in written}, REMEDY


@pytest.mark.slow
def test_pictures_are_fresh(generator: ModuleType) -> None:
    for name, drawn in generator.pictures().items():
        assert drawn() == (DOCS / "pictures" / name).read_text(encoding="utf-8"), f"{name}: {REMEDY}, with --pictures"
