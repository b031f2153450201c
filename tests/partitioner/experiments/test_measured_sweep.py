"""Placements of a sweep that really run, under torchrun on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from partitioner.experiments import sweep
from partitioner.experiments.run.measure import check_measurable, last_error
from passes.ir.errors import ConfigError
from tests.support.planning.sweep_models import perceptron


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_planned_is_run_once(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    predicted = sweep({"net": perceptron}, 2, ["data", "pipeline"], "h100:1x2", store=store, workers=0)
    measured = sweep({"net": perceptron}, 2, ["data", "pipeline"], "h100:1x2", store=store, workers=0, measure=True)
    assert [row.reason for row in measured.table] == ["", ""]
    assert [(row.key, row.step_time) for row in measured.table] == [(row.key, row.step_time) for row in predicted.table]
    assert all(row.measured_step_time is not None and row.measured_step_time > 0 for row in measured.table)
    again = sweep({"net": perceptron}, 2, ["data", "pipeline"], "h100:1x2", store=store, workers=0, measure=True)
    assert again == measured


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("Traceback:\n  line 3\nValueError: no rows\n    raise ChildFailedError(\n", "ValueError: no rows"),
        (
            "    raise ChildFailedError(\ntorch.ChildFailedError:\n  exitcode  : -6\n  traceback : Signal 6 (SIGABRT) received by PID 7\n",
            "Signal 6 (SIGABRT) received by PID 7",
        ),
        ("\nit was tired\n", "it was tired"),
        ("", "it ended without a word"),
    ],
)
def test_the_reason_is_the_error_or_the_signal(log: str, told: str) -> None:
    assert last_error(log) == told


def test_models_that_other_processes_cannot_make_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model net cannot be made in other processes"):
        check_measurable({"net": lambda: (None, ())})
    check_measurable({"net": perceptron, "file": "net.py:factory"})
