"""A plan's JSON with one entry changed, for every entry: an equal plan, right numbers, or an error that names the entry."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, PartitionError, Plan, partition
from passes.ir.plan import Plan as Decided

Path = tuple[str | int, ...]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.third(torch.relu(self.second(torch.relu(self.first(x))))))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))


ROWS, IMAGES = (8, 4), (4, 2, 8, 8)
PLANS: dict[str, tuple[Any, tuple[int, ...], int, Any, dict[str, Any]]] = {
    "pipeline": (Perceptron, ROWS, 2, "pipeline", {"n_microbatches": 2}),
    "data": (Perceptron, ROWS, 2, "data", {}),
    "selective": (Perceptron, ROWS, 2, "data", {"recompute": "selective"}),
    "tensor": (Perceptron, ROWS, 2, "tensor", {}),
    "data and pipeline": (Perceptron, ROWS, 4, {"data": 2, "pipeline": 2}, {}),
    "shared stages": (Perceptron, ROWS, 3, {"pipeline": (2, 1)}, {}),
    "different widths": (Perceptron, ROWS, 3, {"pipeline": 2, "tensor": (2, 1)}, {}),
    "interleaved": (Perceptron, ROWS, 2, "pipeline", {"schedule": "Interleaved1F1B"}),
    "tiles": (convolutions, IMAGES, 2, "tile", {}),
    "sequential tiles": (convolutions, IMAGES, 1, {"tile": 4}, {}),
}

NUMBERS = (-1, 0, 1, 2, 10**6, 10**30, 1.5, 1e300, math.nan, math.inf, True)
WRONG: tuple[Any, ...] = (*NUMBERS, None, "bogus", "", [], [1], ["data", 2], {}, {"bogus": 1})


class Case:
    """A model, its plan, and what the model computes."""

    def __init__(self, name: str) -> None:
        make, shape, self.devices, mode, options = PLANS[name]
        torch.manual_seed(0)
        self.model = make().double()
        self.x, self.y = torch.randn(shape, dtype=torch.float64), torch.randn(self.model(torch.zeros(shape).double()).shape).double()
        pm = partition(self.model, self.devices, mode, example_inputs=self.x, progress=False, **options)
        self.plan, self.text = pm.plan, pm.plan.to_json()
        self.loss = nn.functional.mse_loss(self.model(self.x), self.y)
        gradients = torch.autograd.grad(self.loss, list(self.model.parameters()))
        self.gradients = {key: each for (key, _), each in zip(self.model.named_parameters(), gradients, strict=True)}

    def check(self, plan: Plan) -> None:
        """Raise unless the model runs by the plan with the numbers of the model, or refuses with a PartitionError."""
        pm: PartitionedModel = partition(self.model, self.devices, plan=plan, example_inputs=self.x, progress=False)
        torch.testing.assert_close(pm(self.x), self.model(self.x))
        torch.testing.assert_close(pm.train_step(self.x, target=self.y, loss_fn=nn.functional.mse_loss), self.loss.detach())
        torch.testing.assert_close(pm.full_gradients(), self.gradients)
        pm.verify()
        assert str(pm)
        assert pm.explain()


made = functools.cache(Case)


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from paths(value[key], (*path, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def edits(document: Any) -> Iterator[tuple[Path, str, Any]]:
    """Yield the document with a node removed, replaced, doubled, reversed, or with an additional entry."""
    for path in paths(document):
        found = at(document, path)
        if path:
            for value in WRONG:
                changed = copy.deepcopy(document)
                at(changed, path[:-1])[path[-1]] = value
                yield path, f"= {value!r}", changed
            changed = copy.deepcopy(document)
            del at(changed, path[:-1])[path[-1]]
            yield path, "removed", changed
        if isinstance(found, list):
            for what, items in (("doubled", [*found, *found]), ("reversed", found[::-1]), ("longer", [*found, None])):
                changed = copy.deepcopy(document)
                at(changed, path[:-1])[path[-1]] = items
                yield path, what, changed
        if isinstance(found, dict):
            changed = copy.deepcopy(document)
            at(changed, path)["elephant"] = 1
            yield path, "has elephant", changed


def decisions(plan: Plan) -> tuple[Any, ...]:
    """Return a plan's decisions, without predictions and notes."""
    stages = tuple((stage.ranks, stage.first_node) for stage in plan.stages)
    halos = tuple((run.first, run.last, run.strategy) for run in plan.halos)
    places = (plan.mesh, plan.devices, plan.widths, plan.axes, plan.tiles, plan.tile_budget)
    return (places, stages, halos, plan.schedule, plan.n_microbatches, plan.recompute, plan.batch_size, plan.batchnorm, plan.weights)


def parsed(case: Case) -> Iterator[tuple[str, Plan]]:
    """Yield the edits that are plans. All others are refused, with the entry, or one that contradicts it, by name."""
    for path, what, document in edits(json.loads(case.text)):
        where = f"{path} {what}"
        try:
            yield where, Plan.from_json(json.dumps(document))
        except ConfigError as error:
            names = (*(key for key in path if isinstance(key, str)), "elephant", *CONTRADICTED)
            if not error.remedy or not any(name in str(error) for name in names):
                raise AssertionError(f"{where} is not named: {error}") from error


CONTRADICTED = ("plan.stages", "plan.n_microbatches", "plan.mesh", "plan.prediction.memory")
"""Entries that others have to fit: where one of two is changed, either may be named."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_every_edit_is_a_plan_or_named(name: str) -> None:
    case = made(name)
    found = list(parsed(case))
    assert len(found) > 20
    assert all(isinstance(plan, Decided) for _, plan in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a batch of .* rows does not divide")
@pytest.mark.parametrize("name", PLANS)
def test_every_edit_that_decides_runs_right_or_is_refused(name: str) -> None:
    case = made(name)
    seen = {decisions(case.plan)}
    for where, plan in parsed(case):
        if decisions(plan) not in seen:
            seen.add(decisions(plan))
            try:
                case.check(plan)
            except PartitionError:
                continue
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    assert len(seen) > 10


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("recompute", "sometimes"),
        ("batchnorm", "mine"),
        ("axes", [["elephants", "pipeline"]]),
        ("axes", [["batch", "data"]]),
        ("devices", ["cpu", "elephant"]),
        ("schedule", "1F1C"),
        ("n_microbatches", 0),
        ("mesh", [["pipeline", 10**9]]),
        ("mesh", [["wheels", 2]]),
        ("tiles", [2, 2]),
        ("tile_budget", 5),
        ("prediction.memory", [1]),
        ("prediction.step_time", -1.0),
        ("prediction.gap", math.inf),
        ("widths", [2, 1]),
    ],
)
def test_what_no_plan_says_names_its_entry(entry: str, value: Any) -> None:
    case = made("pipeline")
    fields = json.loads(case.text)
    within, _, name = entry.rpartition(".")
    (fields[within] if within else fields)[name] = value
    with pytest.raises(ConfigError, match=rf"plan\.{entry}") as caught:
        case.check(Plan.from_json(json.dumps(fields)))
    assert caught.value.remedy


@pytest.mark.parametrize("entry", ["contenders", "gap", "step_time"])
def test_a_prediction_that_lacks_an_entry_is_refused(entry: str) -> None:
    fields = json.loads(made("pipeline").text)
    del fields["prediction"][entry]
    with pytest.raises(ConfigError, match=entry):
        Plan.from_json(json.dumps(fields))


def test_equal_decisions_are_equal_plans_whatever_was_predicted() -> None:
    plan = Plan.from_json(made("pipeline").text)
    dearer = plan.predicted(step_time=2 * plan.step_time, gap=0.5, notes=("priced otherwise",))
    stage = dataclasses.replace(plan.stages[0], forward_time=7.0)
    assert dataclasses.replace(dearer, stages=(stage, *plan.stages[1:])) == plan
    assert dearer.hash == plan.hash
    assert dearer.prediction != plan.prediction
    other = dataclasses.replace(plan, recompute="full")
    assert other != plan
    assert other.hash != plan.hash


def test_a_step_of_a_million_microbatches_is_refused() -> None:
    case = made("pipeline")
    text = json.dumps({**json.loads(case.text), "n_microbatches": 10**6})
    with pytest.raises(ConfigError, match="2000000 forwards"):
        case.check(Plan.from_json(text))


NO_PLANS = ("[" * 100_000, '{"a":' * 100_000, "1" * 5000, '{"format": 1, "format": 1}', "\0", "nan", '"', "[]", "1e999")


@pytest.mark.parametrize("text", NO_PLANS, ids=range(len(NO_PLANS)))
def test_what_is_no_json_of_a_plan(text: str) -> None:
    with pytest.raises(ConfigError, match="plan"):
        Plan.from_json(text)


def test_a_plan_runs_where_the_devices_are() -> None:
    """A plan that was made for accelerators, on the CPU: it says where it runs."""
    case = made("pipeline")
    text = json.dumps({**json.loads(case.text), "devices": ["cuda:0", "cuda:1"]})
    found = partition(case.model, 2, plan=Plan.from_json(text), example_inputs=case.x)
    assert found.plan == case.plan
