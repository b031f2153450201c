"""``Trainer(model=pm, ...)``: the log of Trainer's own run of the unpartitioned model, also after a checkpoint."""

# transformers' class is Any.
# mypy: allow-subclassing-any

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from partitioner.integrations.transformers import Trainer
from tests.partitioner.integrations.loops import problems
from tests.partitioner.integrations.transformers.training import (
    Trained,
    best_of_new_model,
    few_steps,
    local_rows,
    refusals,
    smoothed_mean,
    trained,
)
from tests.support.processes.processes import Workers

KINDS = ("gpt", "resnet")
MODES = ("pipeline", "fsdp", "tensor")
ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2}
SMOOTHED: dict[str, Any] = {"label_smoothing_factor": 0.1}
CASES = [(kind, mode, options) for kind in KINDS for mode in MODES for options in ({}, ACCUMULATED)] + [("gpt", "tensor", SMOOTHED)]

_whole: dict[str, Trained] = {}


def whole(kind: str, options: dict[str, Any], folder: Path) -> Trained:
    """Return the run of the unpartitioned model."""
    key = json.dumps((kind, options))
    if key not in _whole:
        _whole[key] = trained(kind, None, str(folder), options)
    return _whole[key]


def differences(kind: str, found: Trained, wanted: Trained) -> list[str]:
    """Compare two runs; transformers computes its losses in float32, whose rounding the order of sums changes."""
    tolerance = 1e-6 if kind == "gpt" else 1e-9
    return [
        *problems(found.logged, wanted.logged, "log", max(tolerance, 1e-7)),
        *problems([found.evaluated], [wanted.evaluated], "loss of evaluation", tolerance),
        *problems(found.predictions, wanted.predictions, "predictions", tolerance),
        *(problems(found.resumed[-15:], wanted.logged[15:], "log after resuming", max(tolerance, 1e-7)) if found.resumed else ()),
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "mode", "options"), CASES, ids=str)
def test_in_one_process(kind: str, mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert not differences(kind, trained(kind, mode, str(tmp_path / "pm"), options), whole(kind, options, tmp_path / "whole"))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "mode", "options"), CASES, ids=str)
def test_in_processes(kind: str, mode: str, options: dict[str, Any], tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    wanted = whole(kind, options, tmp_path / "whole")
    for found in workers(2).values(trained, kind, mode, str(tmp_path / "pm"), options, timeout=580):
        assert not differences(kind, found, wanted)


LOCAL = [
    ("gpt", "data", {}),
    ("gpt", "fsdp", ACCUMULATED),
    ("gpt", "fsdp", {"average_tokens_across_devices": False}),
    ("gpt", "fsdp", {"summed_loss": True, **ACCUMULATED}),
    ("resnet", "fsdp", ACCUMULATED),
]
"""Each process reads half of the rows of every batch: together these are the batches of one process."""


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "mode", "options"), LOCAL, ids=str)
def test_local_rows_in_processes(kind: str, mode: str, options: dict[str, Any], tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    wanted = local_rows(kind, None, str(tmp_path / "whole"), options)
    for found in workers(2).values(local_rows, kind, mode, str(tmp_path / "pm"), options, timeout=580):
        assert not differences(kind, found, wanted)


FEW_STEPS = [
    ("counted", "data", "local"),
    ("net inside", "tensor", "global"),
    ("net inside", "fsdp", "local"),
    ("model inside", "tensor", "global"),
    ("model inside", "fsdp", "local"),
]
"""A loss that the model returns is of the rows of all processes, also through a module around it; one of its outputs is not."""


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode", "inputs"), FEW_STEPS, ids=str)
def test_few_steps_in_processes(kind: str, mode: str, inputs: str, tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    wanted = few_steps(kind, None, "global", str(tmp_path), {})
    for found in workers(2).values(few_steps, kind, mode, inputs, str(tmp_path), {}, timeout=580):
        assert not problems(found, wanted, "log", 1e-7)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_trainer_makes(tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    wanted = best_of_new_model(None, str(tmp_path / "whole"))
    for found in workers(2).values(best_of_new_model, "tensor", str(tmp_path / "pm"), timeout=580):
        assert not problems(found, wanted, "log", 1e-6)


class OfOwnLoss(transformers.Trainer):
    """Reads more than the loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(("bases", "is_alone"), [((), True), ((transformers.Seq2SeqTrainer,), True), ((OfOwnLoss,), False)])
def test_beside_another_subclass(bases: tuple[type, ...], is_alone: bool) -> None:
    kind: Any = type("Both", (Trainer, *bases), {})
    run = kind.__new__(kind)
    vars(run).update(compute_loss_func=None, label_smoother=None, args=SimpleNamespace())
    assert run._reads_loss_alone is is_alone


@pytest.mark.slow
@pytest.mark.gloo
def test_the_class_of_transformers_is_refused_in_processes(tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    for said in workers(2).values(refusals, str(tmp_path)):
        assert len(said) == 3
        assert all("from partitioner.integrations.transformers import Trainer" in each for each in said)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_smoothed_loss_of_local_rows(tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    """It is computed of each process's outputs, and its gradients are those of the mean over processes."""
    wanted = smoothed_mean(str(tmp_path), SMOOTHED)
    for found in workers(2).values(few_steps, "gpt", "fsdp", "local", str(tmp_path), SMOOTHED, timeout=580):
        assert abs(found[0] - wanted) < 1e-6  # computed in float32
