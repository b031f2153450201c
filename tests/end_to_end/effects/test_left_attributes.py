"""Tensors that forward leaves on modules are on those of a partitioned model, differentiable, in every mode and both runtimes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import partition
from passes.ir.errors import ConfigError
from tests.support.processes.processes import Workers
from tests.support.running.effects import How, Leaves, left_difference
from tests.support.running.slow_values import slow

HOWS: tuple[How, ...] = ("no_grad", "backward", "train_step")
MODES: tuple[Any, ...] = ("model", "pipeline", "data", "fsdp", "tensor", {"data": 2, "pipeline": 2})


@pytest.mark.parametrize(
    ("how", "mode", "options"),
    [
        pytest.param("backward", "model", {}, marks=pytest.mark.slow),
        ("backward", "data", {}),
        pytest.param("train_step", "pipeline", {"n_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("train_step", "data", {}, marks=pytest.mark.slow),
        ("no_grad", "pipeline", {"n_microbatches": 2}),
    ],
)
def test_what_forward_leaves(how: How, mode: Any, options: dict[str, Any]) -> None:
    assert left_difference(how, 2, mode, options) is None


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_forward_leaves_in_every_mode(how: How, mode: Any) -> None:
    devices = 4 if isinstance(mode, dict) else 2
    assert left_difference(how, devices, mode, {"n_microbatches": 1}, True) is None


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("how", "mode", "options"),
    [
        ("train_step", "pipeline", {"n_microbatches": 2}),
        ("no_grad", "pipeline", {}),
        ("backward", "data", {}),
    ],
)
def test_what_forward_leaves_in_processes(workers: Callable[[int], Workers], how: How, mode: Any, options: dict[str, Any]) -> None:
    assert workers(2).values(left_difference, how, 2, mode, options, timeout=120) == [None] * 2


@pytest.mark.slow
def test_attributes_that_microbatches_cannot_compute_are_refused_when_they_are_read() -> None:
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    pm: Any = partition(Leaves(), 2, "pipeline", example_inputs=(x,), n_microbatches=2)
    pm(x)
    assert pm.blocks[0].aux is not None
    with pytest.raises(ConfigError, match="mixed has no value: it mixes rows of the batch"):
        _ = pm.mixed
    with pytest.raises(ConfigError, match="loss_fn reads attribute mixed"):
        pm.train_step(x, target=x[:, 0], loss_fn=lambda result, target: nn.functional.mse_loss(result, target) + pm.mixed)


def test_attributes_after_a_step_are_refused_by_name() -> None:
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    pm: Any = partition(Leaves(), 2, "model", example_inputs=(x,))
    pm.train_step(x, target=x[:, 0], loss_fn=nn.functional.mse_loss)
    with pytest.raises(
        ConfigError, match=r"blocks\.0\.aux has no value: train_step\(\) gives tensors in attributes to its loss function alone"
    ):
        _ = pm.blocks[0].aux
    pm.blocks[0].aux = None  # as a user resets it
    assert pm.blocks[0].aux is None


def test_the_model_stays_as_it_is() -> None:
    model, x = Leaves(), torch.randn(4, 3, 8, dtype=torch.float64)
    pm: Any = partition(model, 2, "model", example_inputs=(x,))
    pm(x)
    block: Any = model.blocks[0]
    assert (block.aux, block.maps, block.stats, model.mixed, model.last) == (None, [], {}, None, {})
    pm.blocks[0].maps.clear()
    pm(x)
    assert len(pm.blocks[0].maps) == 1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 4), 0
        self.first: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.first is None:
            self.first = x.mean()
        return self.layer(x)  # type: ignore[no-any-return]


def test_values_of_the_first_call_alone_are_not_those_of_later_calls() -> None:
    pm: Any = partition(Counts(), 1, "model", example_inputs=(torch.zeros(2, 4),))
    pm(torch.zeros(2, 4))
    assert (pm.steps, pm.first) == (1, None)  # no call of pm has set the second, which is that of the model


class Tallies(nn.Module):
    """Counts calls, rows and batches, and keeps numbers that no addition of the same count gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls, self.rows = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 3, 0
        self.totals: dict[str, Any] = {"rows": 0, "of": {"calls": 10}}
        self.warmth, self.phase = 1.0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rows += x.shape[0]
        self.totals["rows"] += 2 * x.shape[0]
        self.totals["of"]["calls"] -= 1
        self.warmth, self.phase = self.warmth * 0.5, self.phase * 2
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["data", *slow("pipeline", "tensor", "model")])
def test_counts_of_forward_count_the_calls_of_the_partitioned_model(mode: str) -> None:
    model = Tallies()
    options: dict[str, Any] = {"n_microbatches": 2} if mode == "pipeline" else {}
    pm: Any = partition(copy.deepcopy(model), 2, mode, example_inputs=(torch.zeros(4, 4),), progress=False, **options)
    for rows in (4, 4, 8, 6):
        for module in (model, pm):
            module(torch.ones(rows, 4))
    pm.train_step(torch.ones(4, 4), target=torch.ones(4, 4), loss_fn=nn.functional.mse_loss)
    model(torch.ones(4, 4))
    assert (pm.calls, pm.rows, pm.totals) == (model.calls, model.rows, model.totals) == (8, 26, {"rows": 52, "of": {"calls": 5}})
    assert (pm.warmth, pm.phase) == (1.0, 1)
    (note,) = [each for each in pm.plan.notes if "unchanged" in each]
    assert note.startswith("calls leave warmth, phase unchanged: forward changes them in every call")


class Observes(nn.Module):
    """Keeps a tensor, and updates the statistics of a norm whose result nothing reads."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.norm(y)
        self.hidden = y
        return y


@pytest.mark.parametrize("momentum", [0.1, pytest.param(None, marks=pytest.mark.slow)])
def test_statistics_of_a_norm_whose_result_is_not_read(momentum: float | None) -> None:
    """Without a momentum, they are updated in a block without gradients, which is a graph of its own at first."""
    model, x = Observes(momentum), torch.randn(4, 4)
    pm = partition(copy.deepcopy(model), 1, "model", example_inputs=(x,), training=True)
    for module in (model, pm):
        module(x)
    torch.testing.assert_close(pm.full_state_dict()["norm.running_mean"], model.norm.running_mean)
