"""Names say what a thing is."""

from __future__ import annotations

from pathlib import PurePosixPath

from tests.project.architecture.source_tree import PACKAGES, ROOT, report, sources

EMPTY_WORDS = {"util", "utils", "utility", "utilities", "helper", "helpers", "manager", "managers", "common", "misc", "stuff"}


def test_no_file_is_called_after_nothing() -> None:
    offences = [
        f"{source.path}:1: {', '.join(sorted(words))}"
        for source in sources()
        if (words := EMPTY_WORDS & {word for part in PurePosixPath(source.path).with_suffix("").parts for word in part.split("_")})
    ]
    assert not offences, report(offences, "name the file by the concept that it holds; move what belongs elsewhere")


def test_the_packages_exist_and_are_typed() -> None:
    missing = [
        f"{package}/{name}:1" for package in PACKAGES for name in ("__init__.py", "py.typed") if not (ROOT / package / name).is_file()
    ]
    assert not missing, report(missing, "every package has both files")


def test_every_source_folder_is_a_package() -> None:
    """A folder without ``__init__.py`` is left out of import analysis without a word, and one of ``tests`` shadows its package."""
    folders = {path.parent for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*.py")}
    missing = [f"{(folder / '__init__.py').relative_to(ROOT)}:1" for folder in sorted(folders) if not (folder / "__init__.py").is_file()]
    assert not missing, report(missing, "add it, with one line that says what the folder holds")
