"""Optimizers that read whole matrices, by an owner of each: the numbers of the model's own run, and messages as planned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import OwnerOptimizer, PartitionedModel, register_optimizer
from passes.ir.errors import ConfigError
from tests.support.optimizers import owner_cases as cases
from tests.support.processes.optimizer_cases import Mode, Undeclared, batches, made, model, square
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import all_but

CLOSE = 1e-9
EVERY = list(cases.MAKES)

_made: dict[str, PartitionedModel] = {}


def fresh(mode: Mode, devices: int) -> PartitionedModel:
    """Return the model partitioned once for all tests, as it was at first."""
    key = f"{mode} {devices}"
    if key not in _made:
        _made[key] = made(mode, devices)
    return cases.restored(_made[key])


# -- in one process ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", all_but(["exact Muon"], EVERY))
@pytest.mark.parametrize("mode", ["fsdp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tensor", "data", "pipeline"))])
def test_trains_as_on_the_model(mode: Mode, name: str) -> None:
    """Accumulated, clipped, with groups, weight decay, a schedule of the rate, and parameters that are frozen on the way."""
    assert cases.owned_difference(fresh(mode, 2), name) < CLOSE


@pytest.mark.slow
@pytest.mark.usefixtures("devices_apart")
@pytest.mark.parametrize(
    ("mode", "devices", "names"),
    [
        ("tensor", 2, ["Shampoo"]),
        ("tensor", 2, EVERY),
        ("fsdp", 2, EVERY),
        ({"data": 2, "tensor": 2}, 4, EVERY),
        ({"pipeline": 2, "fsdp": 2}, 4, EVERY),
    ],
    ids=str,
)
def test_owners_on_several_devices_of_one_process(mode: Mode, devices: int, names: list[str]) -> None:
    pm = made(mode, devices)
    for name in names:
        assert cases.owned_difference(cases.restored(pm), name) < CLOSE
        assert not cases.full_state_problems(cases.restored(pm), name)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fsdp", "pipeline"), ("pipeline", "tensor"), ("tensor", "fsdp")])
def test_a_checkpoint_continues_in_another_plan(before: Mode, after: Mode, tmp_path: Path) -> None:
    assert cases.resumed_difference("Shampoo", fresh(before, 2), fresh(after, 2), str(tmp_path)) < CLOSE


@pytest.mark.slow
def test_states_are_those_of_the_model() -> None:
    for name in ("Adafactor", "Shampoo"):
        assert not cases.full_state_problems(fresh("fsdp", 2), name)


def test_what_processes_will_communicate_is_known_in_one() -> None:
    """Gradients and values of half of each parameter come to its owner, and half of its new value goes back."""
    pm = fresh("fsdp", 2)
    optimizer = OwnerOptimizer(pm.parameters(), torch.optim.Adafactor)
    assert not optimizer.plan.messages
    plan = optimizer.plan_of_processes
    halves = sum(parameter.numel() // 2 * 8 for parameter in pm.parameters() if parameter.shape[0] % 2 == 0)
    uneven = {name for name, parameter in pm.named_parameters() if parameter.shape[0] % 2}
    assert plan.restricted_to(set(plan.owners) - uneven).total_bytes == 3 * halves
    assert plan.imbalance < 1.1
    assert "15 sharded parameters, each updated whole by its owner" in str(plan)


@pytest.mark.slow
def test_a_group_is_added_later() -> None:
    pm, reference = fresh("fsdp", 2), model()
    for module, make in ((pm, OwnerOptimizer), (reference, cases.on_the_model)):
        parameters = list(module.parameters())
        optimizer = make(parameters[:4], cases.Shampoo, lr=1e-3)
        cases.train(module, [optimizer], range(1), [])
        optimizer.add_param_group({"params": parameters[4:], "lr": 2e-3})
        cases.train(module, [optimizer], range(1, 3), [])
    assert cases.distance(pm, reference) < CLOSE


def test_a_closure_is_called_before_the_update() -> None:
    pm, reference = fresh("fsdp", 2), model()
    x, target = batches(1)[0]
    theirs = torch.optim.Adafactor(reference.parameters(), lr=1e-2)
    square(reference(x), target).backward()
    theirs.step()
    optimizer = OwnerOptimizer(pm.parameters(), torch.optim.Adafactor, lr=1e-2)
    loss = optimizer.step(lambda: pm.train_step(x, target=target, loss_fn=square))
    torch.testing.assert_close(loss, square(model()(x), target))
    assert cases.distance(pm, reference) < CLOSE


class Insisting(cases.Shampoo):
    """Its step runs the model."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        """Refuse a step without a closure."""
        raise NotImplementedError


register_optimizer(Insisting, "parameters")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pm: OwnerOptimizer(pm.parameters(), torch.optim.LBFGS), "LBFGS reads all parameters at once"),
        (lambda pm: OwnerOptimizer(pm.parameters(), Undeclared), r'register_optimizer\(Undeclared, "parameters"\)'),
        (lambda pm: OwnerOptimizer(pm.parameters(), Insisting), "Insisting.step needs a closure"),
        (lambda pm: OwnerOptimizer(pm.parameters(), "Muon"), "'Muon' is no class of optimizers"),  # type: ignore[arg-type]
        (lambda pm: OwnerOptimizer(pm.parameters(), OwnerOptimizer), "is no class of optimizers of whole parameters"),
        (lambda pm: OwnerOptimizer(next(pm.parameters()), torch.optim.Adafactor), "params is a Parameter"),
        (lambda pm: OwnerOptimizer(model().parameters(), torch.optim.Adafactor), "no parameters of a partitioned model"),
        (lambda pm: OwnerOptimizer([], torch.optim.Adafactor, model=nn.Linear(1, 1)), "model is a Linear"),
        (lambda pm: copy.deepcopy(OwnerOptimizer(pm.parameters(), torch.optim.Adafactor)), "cannot be copied or pickled"),
    ],
)
def test_what_is_refused(make: Callable[[PartitionedModel], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(fresh("fsdp", 2))


def test_shapes_and_arguments_are_checked_by_the_class_itself() -> None:
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        OwnerOptimizer(fresh("fsdp", 2).parameters(), torch.optim.Muon)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentums'"):
        OwnerOptimizer(cases.matrices(fresh("fsdp", 2)), torch.optim.Muon, momentums=1)


# -- in processes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "devices", "names"),
    [
        ("fsdp", 2, ["exact Muon"]),
        *((mode, 2, EVERY) for mode in ("fsdp", "tensor", "pipeline", "data", "zero1", "zero2")),
        *((mode, 4, EVERY) for mode in ({"data": 2, "tensor": 2}, {"pipeline": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}, "fsdp")),
    ],
    ids=str,
)
def test_trains_as_on_the_model_in_processes(mode: Mode, devices: int, names: list[str], workers: Callable[[int], Workers]) -> None:
    """Each rank sends as many bytes as were planned."""
    for found in workers(devices).values(cases.differences_in_processes, mode, names, timeout=170):
        assert max(found.values()) < CLOSE, found


@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("modes", "devices", "names"),
    [
        pytest.param(["fsdp", "tensor"], 2, ["Shampoo"], marks=pytest.mark.slow),
        pytest.param(["tensor", "pipeline"], 2, EVERY, marks=pytest.mark.slow),
        pytest.param([{"data": 2, "tensor": 2}, {"pipeline": 2, "fsdp": 2}], 4, EVERY, marks=pytest.mark.slow),
        pytest.param([{"pipeline": 2, "fsdp": 2}, "fsdp"], 4, EVERY, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_checkpoints_in_processes(
    modes: list[Mode], devices: int, names: list[str], workers: Callable[[int], Workers], tmp_path: Path
) -> None:
    for found in workers(devices).values(cases.checkpoints_in_processes, modes, names, str(tmp_path), timeout=170):
        assert not any(found[f"state of {name}"] for name in names), found
        assert max(found[f"resumed {name}"] for name in names) < CLOSE, found


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_plans_and_refusals_in_processes(workers: Callable[[int], Workers]) -> None:
    (text, between, again), *others = workers(2).values(cases.planned_in_processes, "fsdp", timeout=170)
    expected = OwnerOptimizer(fresh("fsdp", 2).parameters(), torch.optim.Adafactor).plan_of_processes
    assert text == again == str(expected)
    assert between == expected.bytes_between
    assert others == [(text, between, again)]
    for said in workers(2).values(cases.refusals_in_processes, "fsdp", timeout=170):
        assert "1.up.weight is in group 0 of the optimizer of one rank, and rank 1 does not list it" in said["another list"]
        assert "some ranks have a gradient of 1.up.weight, and others have none" in said["gradient on one rank"]
        assert not said["all"]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("mode", "devices"), [("pipeline", 2), ({"pipeline": 2, "fsdp": 2}, 4)], ids=str)
def test_ranks_without_any_parameter_of_the_optimizer(mode: Mode, devices: int, workers: Callable[[int], Workers]) -> None:
    for found in workers(devices).values(cases.ranks_without_any, mode, timeout=170):
        assert not found["state"]
        assert max(found["difference"], found["resumed"]) < CLOSE, found
