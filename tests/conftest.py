"""Settings of every test."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests.support.golden_text import Golden
from tests.support.processes.processes import Workers

settings.register_profile("partitioner", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("partitioner")  # timings never decide a test, and a failure comes back on the next run

torch.set_num_threads(1)  # test workers share the cores
gc.set_threshold(100_000, 20, 50)  # graphs are many objects that live: Python's collector takes a tenth of the time


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests that start processes in one worker, in sequence: they share fixtures and do not crowd the cores.

    So do those of the architecture, which read every file of the project.
    """
    for item in items:
        if item.get_closest_marker("gloo"):
            item.add_marker(pytest.mark.xdist_group("gloo"))
        elif item.nodeid.startswith("tests/project/architecture/"):
            item.add_marker(pytest.mark.xdist_group("architecture"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what the programs print now into tests/support/golden")
    parser.addoption("--torch-warnings", action="store_true", help="let warnings of torch be errors, as all others are")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--torch-warnings"):
        for category in ("DeprecationWarning", "FutureWarning", "UserWarning"):
            config.addinivalue_line("filterwarnings", f"error::{category}:torch.*")


@pytest.fixture
def devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parameters be stored as if every rank ran on a device of its own."""
    monkeypatch.setattr("partitioner.runtime.state.materialize.device_keys", lambda devices: tuple(range(len(devices))))


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Workers]]:
    """Yield a function that returns processes for so many ranks, started on demand. With two, the script initialised torch.distributed."""
    from tests.support.processes.torchrun_cases import take_existing_group  # noqa: PLC0415  the models that it builds are slow to import

    running: dict[int, Workers] = {}

    def start(size: int) -> Workers:
        if size not in running or not running[size].usable:
            running[size] = Workers(size)
            if size == 2:
                assert running[size].values(take_existing_group, 77, timeout=120) == [(77.0, True)] * 2
        return running[size]

    yield start
    for each in running.values():
        each.close()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with the one that is kept; see ``tests.support.golden_text``."""
    return Golden(update=request.config.getoption("--update-golden"))
