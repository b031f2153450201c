"""Copies and pickles of a partitioned model, and averages of its weights."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from partitioner import PartitionedModel, partition
from tests.support.models.switched import switched
from tests.support.processes import module_cases as cases
from tests.support.processes.processes import Workers


def trained(module: nn.Module, x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    module(x).square().mean().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    return module


def make(mode: str) -> tuple[PartitionedModel, Tensor]:
    model, x = switched()
    return partition(model, 2, mode, example_inputs=(x,), progress=False), x


def saved(pm: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(pm, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda pm: pickle.loads(pickle.dumps(pm)), saved],  # noqa: S301
    ids=["deepcopy", "pickle", "save"],
)
@pytest.mark.parametrize("mode", ["data", "tensor"])
def test_copies_compute_the_same_and_train_apart(mode: str, how: Callable[[Any], Any]) -> None:
    pm, x = make(mode)
    trained(pm, x)
    pm.head.bias.requires_grad_(requires_grad=False)
    pm.drop.eval()
    pm.note = {"mine": 1}
    other = how(pm)
    assert type(other).__mro__[1] is PartitionedModel
    assert other.note == pm.note
    assert other.plan == pm.plan
    assert [part.training for part in other.modules()] == [part.training for part in pm.modules()]
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in pm.parameters()]
    torch.testing.assert_close(dict(other.state_dict()), dict(pm.state_dict()))
    results = []
    for module in (pm, other):
        module.zero_grad()
        trained(module, x)
        results.append(module.eval()(x).detach())
    torch.testing.assert_close(results[0], results[1])
    with torch.no_grad():
        other.up.weight.zero_()
    assert not torch.equal(other(x), results[0])
    torch.testing.assert_close(pm(x).detach(), results[0])


@pytest.mark.parametrize("how", [copy.deepcopy, saved], ids=["deepcopy", "save"])
def test_copies_have_no_gradients(how: Callable[[Any], Any]) -> None:
    """As those of the model: ``nn.Parameter`` copies values alone, and the next backward of a copy is its first."""
    pm, x = make("data")
    model = nn.Linear(3, 2)
    for module, each in ((pm, x), (model, torch.ones(1, 3))):
        module(each).sum().backward()
        assert all(parameter.grad is None for parameter in how(module).parameters())
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_copies_inside_other_objects() -> None:
    """As in an averaged model, or with the optimizer of its parameters."""
    pm, x = make("data")
    outer = nn.ModuleDict({"model": pm, "head": nn.Linear(3, 2).double()})
    optimizer = torch.optim.SGD(outer.parameters(), 0.1)
    copied, its_optimizer = copy.deepcopy((outer, optimizer))
    assert {id(p) for group in its_optimizer.param_groups for p in group["params"]} == {id(p) for p in copied.parameters()}
    shared = copy.copy(pm)
    assert shared.up.weight is pm.up.weight
    torch.testing.assert_close(shared.eval()(x), pm.eval()(x))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_buffers": True}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["swa", "buffers", "ema"])
def test_averages_of_weights(options: dict[str, Any]) -> None:
    model, x = switched()
    pm = partition(copy.deepcopy(model), 2, "tensor", example_inputs=(x,), progress=False)
    results = []
    module: nn.Module
    for module in (model, pm):
        average = AveragedModel(module, **options)
        for _ in range(3):
            trained(module, x)
            average.update_parameters(module)
        results.append((average.state_dict(), average.eval()(x)))
        loaded = AveragedModel(module, **options)
        loaded.load_state_dict(average.state_dict())
        torch.testing.assert_close(loaded.eval()(x), results[-1][1])
    assert list(results[0][0]) == list(results[1][0])
    torch.testing.assert_close(dict(results[1][0]), dict(results[0][0]))
    torch.testing.assert_close(results[1][1], results[0][1])


def test_statistics_of_averages_are_not_taken_anew() -> None:
    """``update_bn`` sets the momentum of the layers, which is a number of the programs. Nothing has changed when it is refused."""
    pm, x = make("data")
    average = AveragedModel(trained(pm, x))
    before = copy.deepcopy(average.state_dict())
    with pytest.raises(AttributeError, match=r"'norm.reset_running_stats': on the BatchNorm1d it is a method"):
        update_bn([x], average)
    torch.testing.assert_close(average.state_dict(), before)


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    x = torch.randn(4, 4)
    pm = partition(model, 2, "data", example_inputs=(x,), progress=False)
    copy.deepcopy(pm).initialize(seed=0)
    pm.initialize(seed=0)
    for other in (copy.deepcopy(pm), pickle.loads(pickle.dumps(pm))):  # noqa: S301
        torch.testing.assert_close(other(x), pm(x))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_processes(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(cases.copy_differences, timeout=170) == [""] * 2


def test_frozen_copies_have_the_parameters_that_they_name() -> None:
    assert not cases.frozen_counts()


@pytest.mark.slow
@pytest.mark.gloo
def test_frozen_copies_in_processes(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(cases.frozen_counts, timeout=110) == [[], []]
