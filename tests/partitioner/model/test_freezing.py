"""Parameters that are frozen, or unfrozen, after the model was partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel
from passes.ir.errors import ConfigError
from tests.support.models.case import Case, Instance
from tests.support.models.zoo import case_named
from tests.support.processes.processes import Workers
from tests.support.running.later_calls import unfreezing_difference
from tests.support.running.transparency import make_partitioned


def pair(name: str, **arguments: Any) -> tuple[Case, Instance, PartitionedModel]:
    case = case_named(name)
    instance = case.build()
    return case, instance, make_partitioned(instance, mode="pipeline", n_microbatches=4, **arguments)


def freeze(pm: PartitionedModel, model: nn.Module, name: str, frozen: bool = True) -> None:
    """Freeze or unfreeze a parameter in both models."""
    for parameters in (model.named_parameters(), pm.named_parameters()):
        dict(parameters)[name].requires_grad_(not frozen)


def step(case: Case, instance: Instance, pm: PartitionedModel, how: str) -> None:
    """Compute the gradients of both."""
    assert case.loss_fn is not None
    loss: Tensor = case.loss_fn(instance.model(*instance.args, **instance.kwargs), instance.target)
    loss.backward()
    if how == "train_step":
        pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)
    else:
        case.loss_fn(pm(*instance.args, **instance.kwargs), instance.target).backward()


def assert_same_gradients(model: nn.Module, pm: PartitionedModel) -> None:
    found = pm.full_gradients()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "how"),
    [
        ("token.weight", "ZB1P", "train_step"),
        ("blocks.2.norm.bias", "1F1B", "backward"),
        *(
            pytest.param(name, schedule, how, marks=pytest.mark.slow)
            for name in ("blocks.1.up.weight", "blocks.2.norm.bias", "token.weight")
            for schedule in ("1F1B", "ZB1P")
            for how in ("train_step", "backward")
        ),
    ],
)
def test_a_frozen_parameter_gets_no_gradient(name: str, schedule: str, how: str) -> None:
    """``token.weight`` is held by two ranks, which sum their gradients."""
    case, instance, pm = pair("gpt", devices=3, schedule=schedule)
    freeze(pm, instance.model, name)
    step(case, instance, pm, how)
    assert dict(pm.named_parameters())[name].grad is None
    assert pm.full_gradients()[name] is None
    assert_same_gradients(instance.model, pm)


@pytest.mark.slow
def test_it_trains_on_without_the_frozen_and_again_with_them() -> None:
    case, instance, pm = pair("gpt", devices=2)
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2) for parameters in (instance.model.parameters(), pm.parameters())]
    for frozen in (False, True, True, False):
        freeze(pm, instance.model, "token.weight", frozen)
        freeze(pm, instance.model, "blocks.0.up.weight", frozen)
        step(case, instance, pm, "train_step")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = pm.full_state_dict()
    for name, weight in instance.model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
def test_a_gradient_from_before_stays_as_it_is() -> None:
    case, instance, pm = pair("gpt", devices=2)
    step(case, instance, pm, "train_step")
    before = pm.full_gradients()["norm.weight"]
    assert before is not None
    before = before.clone()
    freeze(pm, instance.model, "norm.weight")
    step(case, instance, pm, "train_step")
    torch.testing.assert_close(pm.full_gradients()["norm.weight"], before, rtol=0, atol=0)
    assert_same_gradients(instance.model, pm)


@pytest.mark.slow
@pytest.mark.usefixtures("devices_apart")
@pytest.mark.parametrize("how", ["train_step", "backward"])
def test_parts_on_several_devices_frozen_in_part_are_refused(how: str) -> None:
    case = case_named("gpt")
    instance = case.build()
    pm = make_partitioned(instance, devices=2, mode="tensor")
    next(parameter for name, parameter in pm.named_parameters() if name == "blocks.0.up.weight").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight is stored in 2 parts on several devices, and only some"):
        step(case, instance, pm, how)
    with torch.no_grad():
        pm(*instance.args)


@pytest.mark.parametrize(
    "mode",
    ["pipeline", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("fsdp", "model", "data", "zero1", "zero2", "tensor"))],
)
def test_unfrozen_parameters_train_without_a_new_trace(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("partitioner.specialize.make_trace.traced")
    assert unfreezing_difference(mode, 2) is None


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["pipeline", "fsdp", "tensor", "data"])
def test_unfrozen_parameters_of_one_process_train_in_all(workers: Callable[[int], Workers], mode: str) -> None:
    assert workers(2).values(unfreezing_difference, mode, 2, timeout=170) == [None] * 2


@pytest.mark.slow
def test_a_check_compares_what_the_programs_compute() -> None:
    _, instance, pm = pair("gpt", devices=2)
    names = ("token.weight", "blocks.0.up.weight")
    for name in names:
        dict(pm.named_parameters())[name].requires_grad_(False)
    report = pm.check(*instance.args)
    assert report, str(report)
    assert {name for name, parameter in pm.named_parameters() if not parameter.requires_grad} == set(names)
