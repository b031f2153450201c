"""Sweeps on an executor of the caller."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from partitioner.experiments import Results, sweep
from passes.ir.errors import ConfigError
from tests.support.planning.sweep_models import branches, perceptron, wide


def small(**more: Any) -> Results:
    asked = {"models": {"net": perceptron, "wide": wide}, "devices": [2, 4], "modes": ["data", "tensor"], "clusters": "h100:1x4"}
    return sweep(**{**asked, "precision": ["bf16-mixed", None], **more})


def facts(results: Results) -> list[Any]:
    return sorted((row.key, row.status, row.plan_hash, row.step_time, row.peak_memory) for row in results.table)


@pytest.fixture(scope="module")
def here() -> Results:
    return small(workers=0)


@pytest.mark.slow
def test_threads_find_the_rows_of_this_process(here: Results, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as executor:
        first = small(executor=executor, store=tmp_path / "runs.db")
        assert facts(first) == facts(here)
        assert len(first) == 16
        assert facts(small(executor=executor, store=tmp_path / "runs.db")) == facts(here)
        assert executor.submit(int).result() == 0, "the caller's executor was shut down"


@pytest.mark.slow
def test_processes_find_the_rows_of_this_process(here: Results) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        assert facts(small(executor=executor)) == facts(here)


def test_a_sample_of_a_sweep(here: Results) -> None:
    with ThreadPoolExecutor(1) as executor:
        results = small(executor=executor, n_samples=3, seed=1, workers=2)
    assert len(results) == 3
    assert set(facts(results)) < set(facts(here))


class Failing(Executor):
    """Loses every placement."""

    submitted = 0

    def submit(self, *_args: Any, **_keywords: Any) -> Future[Any]:
        self.submitted += 1
        future: Future[Any] = Future()
        future.set_exception(ConnectionError("the node is gone"))
        return future


def test_what_an_executor_loses_is_a_reason() -> None:
    executor = Failing()
    results = small(executor=executor)
    assert executor.submitted == len(results.failures) == 16
    assert {row.reason for row in results.failures} == {"the executor did not plan it: ConnectionError: the node is gone"}


def leave(*_words: Any) -> None:
    os._exit(3)


@pytest.mark.slow
def test_a_process_that_dies_is_a_reason() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=leave) as executor:
        results = small(models={"net": perceptron}, executor=executor)
    assert all("BrokenProcessPool" in row.reason for row in results.failures)
    assert len(results.failures) == len(results)


def test_a_model_that_cannot_be_traced_fails_its_own_placements() -> None:
    with ThreadPoolExecutor(1) as executor:
        results = small(models={"net": perceptron, "branches": branches}, executor=executor, precision=None)
    assert {(row.model, row.status) for row in results.table} == {("net", "ok"), ("branches", "failed")}
    assert all("it lets the values of a tensor decide" in row.reason for row in results.failures)


def test_what_an_executor_cannot_do_is_refused() -> None:
    def local() -> Any:
        return perceptron()

    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(ConfigError, match="cannot be made in other processes"):
            small(models={"net": local}, executor=executor)
        with pytest.raises(ConfigError, match="timeout= is of"):
            small(executor=executor, timeout=3.0)
        with pytest.raises(ConfigError, match="executor must be"):
            small(executor=3)
