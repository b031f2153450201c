"""Optuna as the sampler of a sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from partitioner.experiments import OptunaSampler, sweep
from partitioner.experiments.results.placement import Placement, placements
from partitioner.experiments.results.row import Row, failed_row
from passes.ir.errors import ConfigError
from tests.support.planning.sweep_models import perceptron

GRID = placements(("a",), (2, 4, 8), ("data", "fsdp", {"data": 2, "tensor": 2}), ("x", "y"), microbatches=(1, 2))


def answer(placement: Placement, step_time: float) -> Row:
    return Row(str(placement), placement.model, placement.devices, placement.mode, placement.cluster, step_time=step_time)


def test_it_asks_for_placements_of_the_grid_alone() -> None:
    pytest.importorskip("optuna")
    sampler = OptunaSampler(80, seed=1)
    assert sampler.start(GRID) == 28 == len(GRID)
    asked = []
    while (placement := sampler.ask()) is not None:
        asked.append(placement)
        # Failures are reported, too.
        fast = placement.mode == "fsdp" and placement.devices == 8
        sampler.tell(
            placement, failed_row("k", placement, "no room") if placement.cluster == "y" else answer(placement, 1.0 if fast else 5.0)
        )
    assert len(asked) == 80
    assert set(asked) <= set(GRID)
    # Optuna has the reported results: the fastest of its placements.
    found = [1.0 if each.mode == "fsdp" and each.devices == 8 else 5.0 for each in asked if each.cluster == "x"]
    assert sampler._study.best_trial.value == min(found)


@pytest.mark.slow
def test_a_study_goes_on_in_another_process(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    for seed in (1, 2):
        sampler = OptunaSampler(3, storage=storage, seed=seed)
        sampler.start(GRID)
        while (placement := sampler.ask()) is not None:
            sampler.tell(placement, answer(placement, 1.0))
    trials = optuna.load_study(study_name="partitioner", storage=storage).get_trials(states=[optuna.trial.TrialState.COMPLETE])
    assert len(trials) == 6


def test_a_sweep_takes_what_it_proposes(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    grid: dict[str, Any] = {"models": perceptron, "devices": [2, 4], "modes": ["data", "fsdp"], "clusters": "h100:1x4"}
    results = sweep(**grid, store=tmp_path / "runs.db", sampler=OptunaSampler(3, seed=0), workers=0)
    assert 1 <= len(results) <= 3
    assert not results.failures


def test_arguments_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is below 1"):
        OptunaSampler(0)
    with pytest.raises(ConfigError, match="cannot be compared by 'beauty'"):
        OptunaSampler(1, by="beauty")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="needs Optuna, which is not installed"):
        OptunaSampler(1)
