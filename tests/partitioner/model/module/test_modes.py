"""``train()`` and ``eval()`` switch between forms of one partitioned model that share parameters and buffers."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from passes.ir.errors import PartitionWarning
from tests.support.models.switched import switched
from tests.support.processes import module_cases as cases
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import slow


def train_and_validate(module: nn.Module, x: Tensor, n_epochs: int = 2) -> list[Tensor]:
    """Return validation results, each after a training step that begins in training mode."""
    results, optimizer = [], torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(n_epochs):
        torch.manual_seed(epoch)
        optimizer.zero_grad()
        module.train()(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            results.append(module.eval()(x))
    return results


@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize("mode", ["pipeline", *slow("data", "fsdp", "tensor")])
def test_training_and_validation_with_one_model(mode: str, training: bool) -> None:
    model, x = switched()
    pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), training=training, progress=False)
    assert pm.training is training
    assert all(part.training is training for part in pm.modules())
    torch.testing.assert_close(train_and_validate(pm, x), train_and_validate(model, x))
    torch.testing.assert_close(pm.state_dict(), dict(model.state_dict()))
    assert not pm.training
    assert model.training is False


@pytest.mark.slow
def test_programs_and_plans_are_of_the_mode() -> None:
    model, x = switched()
    pm = partition(model, 2, "data", example_inputs=(x,), progress=False)
    assert pm.train() is pm
    texts = {}
    for mode in (True, False, True):
        pm.train(mode)
        texts[mode] = "".join(graph.code for graph in pm.graphs)
        assert pm.check(x)
        pm.verify()
    assert "dropout" in texts[True]
    assert "dropout" not in texts[False]
    assert model.training
    assert all("evaluation" not in note for note in pm.plan.notes)
    assert "carried over" in pm.eval().plan.notes[-1]


def test_statistics_that_stay_as_they_are() -> None:
    """The mode of one layer, as on the model: ``pm.norm.eval()``."""
    model, x = switched()
    pm: Any = partition(copy.deepcopy(model), 2, "data", example_inputs=(x,), progress=False)
    results = []
    module: Any
    for module in (model, pm):
        module.norm.eval()
        torch.manual_seed(0)
        results.append(module(x))
    torch.testing.assert_close(results[1], results[0])
    assert pm.norm.num_batches_tracked == 0
    assert pm.training


class Frozen(nn.Sequential):
    """Its first layer stays in evaluation mode whatever is asked for."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self[0].eval()
        return self


def test_a_model_with_a_train_method_of_its_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4).double()
    model = Frozen(nn.BatchNorm1d(4), nn.Linear(4, 3)).double().train()
    pm = partition(copy.deepcopy(model), 2, "data", example_inputs=(x,), progress=False)
    for module in (model, pm):
        module.eval()
        module.train()
    torch.testing.assert_close(pm(x), model(x))
    assert [part.training for part in pm.modules()] == [part.training for part in model.modules()] == [True, False, True]


@pytest.mark.slow
def test_microbatches_that_would_change_statistics() -> None:
    """A plan for evaluation has several microbatches; in training there is one, unless the user asked for more."""
    model, x = switched()
    pm = partition(copy.deepcopy(model).eval(), 2, "pipeline", example_inputs=(x,), n_microbatches=4, progress=False)
    with pytest.warns(PartitionWarning, match="each of 4"):
        pm.train()(x)
    free = partition(copy.deepcopy(model).eval(), 2, "pipeline", example_inputs=(x,), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert free.train().plan.n_microbatches == 1


@pytest.mark.slow
def test_a_first_call_in_inference_mode() -> None:
    """Its traces and stored tensors serve training."""
    model, x = switched()
    pm = partition(copy.deepcopy(model), 2, "tensor", example_inputs=(x,), progress=False)
    with torch.inference_mode():
        torch.testing.assert_close(pm.eval()(x), model.eval()(x))
    for found, expected in zip(train_and_validate(pm, x), train_and_validate(model, x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("first", [str, PartitionedModel.verify, *slow(PartitionedModel.explain, PartitionedModel.simulate)])
def test_reports_in_inference_mode_serve_training(first: Callable[[PartitionedModel], object]) -> None:
    """The programs that a report describes are those that train."""
    model, x = switched()
    pm = partition(copy.deepcopy(model), 2, "pipeline", example_inputs=(x,), progress=False)
    with torch.inference_mode():
        first(pm)
    for found, expected in zip(train_and_validate(pm, x, 1), train_and_validate(model, x, 1), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_steps_without_gradients_around_them(off: Callable[[], Any]) -> None:
    """A step computes its own gradients, its first call too."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.rand(6, 4, dtype=torch.float64)
    target = torch.rand(6, 2, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 2, "pipeline", example_inputs=(x,), progress=False)
    with off():
        loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        assert pm.check(x)
    expected = nn.functional.mse_loss(model(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(pm.full_gradients(), {name: parameter.grad for name, parameter in model.named_parameters()})
    pm(x).sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(pm.full_gradients(), {name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_processes(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(cases.mode_differences, timeout=170) == [""] * 2


def test_a_part_of_a_partitioned_model_is_one_of_its_modules() -> None:
    model, x = switched()
    pm: Any = partition(model, 2, "data", example_inputs=(x,), progress=False)
    assert isinstance(pm, PartitionedModel)
    pm.drop.eval()
    assert [name for name, part in pm.named_modules() if not part.training] == ["drop"]


class Adapted(nn.Module):
    """Takes one of two layers by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.active = ["one", "other"]
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.base(x)
        for name in self.active:
            hidden = hidden + self.get_submodule(name)(x)
        return hidden if self.training else hidden.relu()


def change(model: Any) -> None:
    """Switch a layer off, freeze it, train another, and replace the first, as ``set_adapter`` and ``merge_and_unload`` of peft do."""
    model.active.remove("other")
    model.other.requires_grad_(requires_grad=False)
    model.base.requires_grad_()
    model.base = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double()


def test_a_model_that_is_changed_after_it_was_partitioned() -> None:
    """Other modes are those of the model that was partitioned, and the model stays in its present state."""
    torch.manual_seed(0)
    model, x = Adapted().double(), torch.randn(4, 4).double()
    as_it_was = copy.deepcopy(model)
    pm = partition(model, 2, "data", example_inputs=(x,), progress=False)
    change(model)
    for module in (pm.eval(), as_it_was.eval()):
        module(x).square().mean().backward()
    torch.testing.assert_close(pm(x), as_it_was(x))
    torch.testing.assert_close(pm.full_gradients(), {name: each.grad for name, each in as_it_was.named_parameters()})
    assert pm.check(x)
    torch.testing.assert_close(copy.deepcopy(pm)(x), as_it_was(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(pm))(x), as_it_was(x))  # noqa: S301  of its own
    assert model.active == ["one"]
    assert [name for name, each in model.named_parameters() if each.requires_grad] == [
        "base.0.weight",
        "base.0.bias",
        "one.weight",
        "one.bias",
    ]
