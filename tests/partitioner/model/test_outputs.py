"""Results that a model may return: inputs, parameters, buffers, constants, sizes, the same tensor twice, results of early stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, PartitionWarning, partition
from tests.support.running.slow_values import slow


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        y = self.second(hidden.relu()) * self.scale
        return {
            "input": x,
            "y": y,
            "again": y,
            "scale": self.scale,
            "ids": ids,
            "positions": torch.arange(ids.shape[1]),
            "mask": ids > 2,
            "hidden": hidden,
            "number": 3,
            "nothing": None,
            "table": self.table,
            "columns": hidden.t(),
            "rows": x.shape[0],
        }


X = torch.randn(6, 4, dtype=torch.float64)
IDS = torch.arange(18).reshape(6, 3) % 5


def loss_of(output: dict[str, Any], target: object = None) -> Tensor:
    return torch.as_tensor(output["y"].pow(2).mean() + output["scale"] * 0.1 + output["hidden"].mean())


@pytest.fixture(scope="module", params=[2, *slow(3)], ids=["2_ranks", "3_ranks"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, PartitionedModel]:
    torch.manual_seed(0)
    model = Everything().double()
    return model, partition(model, devices=request.param, mode="pipeline", example_inputs=(X, IDS), n_microbatches=2)


@pytest.mark.parametrize("rows", [6, 1, 5])
def test_values(pair: tuple[nn.Module, PartitionedModel], rows: int) -> None:
    model, pm = pair
    expected, found = model(X[:rows], IDS[:rows]), pm(X[:rows], IDS[:rows])
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
        else:
            assert found[name] == value, name


def test_gradients_of_a_step(pair: tuple[nn.Module, PartitionedModel]) -> None:
    model, pm = copy.deepcopy(pair[0]), pair[1]
    pm.zero_grad()
    x, reference = X.clone().requires_grad_(), X.clone().requires_grad_()
    loss = pm.train_step(x, IDS, loss_fn=loss_of)
    expected = loss_of(model(reference, IDS))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    check_gradients(model, pm, x, reference)


def test_gradients_through_autograd(pair: tuple[nn.Module, PartitionedModel]) -> None:
    model, pm = copy.deepcopy(pair[0]), pair[1]
    pm.zero_grad()
    x, reference = X.clone().requires_grad_(), X.clone().requires_grad_()
    loss_of(pm(x, IDS)).backward()
    loss_of(model(reference, IDS)).backward()
    check_gradients(model, pm, x, reference)


def check_gradients(model: nn.Module, pm: PartitionedModel, x: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(x.grad, reference.grad, rtol=1e-12, atol=1e-12)
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_a_loss_that_switches_its_parts(pair: tuple[nn.Module, PartitionedModel]) -> None:
    """A parameter that a loss does not reach has no gradient, and has one again when the loss reaches it."""
    pm = pair[1]
    for early in (True, False, True):
        pm.zero_grad()
        pm.train_step(X, IDS, loss_fn=(lambda output, target: output["hidden"].mean() if early else output["y"].mean()))  # noqa: B023
        assert (pm.full_gradients()["second.weight"] is None) is early


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        result: Tensor = self.layer(x) * scale
        return result if shift is None else result + shift


def test_arguments_may_be_passed_by_place_or_by_name() -> None:
    model, x, scale = Named(), torch.rand(6, 4), torch.rand(4)
    pm = partition(model, devices=2, mode="model", example_inputs=(x,), example_kwargs={"scale": scale})
    for result in (pm(x, scale), pm(x, scale=scale), pm(x=x, scale=scale), pm(scale=scale, x=x)):
        torch.testing.assert_close(result, model(x, scale))
    with pytest.raises(ConfigError, match=r"does not fit Named.forward: missing a required argument: 'scale'"):
        pm(x)
    with pytest.raises(ConfigError, match=r"does not fit Named.forward: got an unexpected keyword argument 'size'"):
        pm(x, scale, size=x)


class Scaled(nn.Module):
    """Takes values that are no tensors, and labels that are classes or probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0, flag: bool = False) -> Tensor:
        result: Tensor = self.layer(x) * scale
        result = result + 1 if flag else result
        return result if labels is None else nn.functional.cross_entropy(result, labels)


@pytest.mark.slow
def test_other_values_and_dtypes_are_traced_in_whatever_order_they_come() -> None:
    model, x, classes = Scaled().double(), torch.rand(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    pm = partition(model, devices=2, mode="fsdp", example_inputs=(x,), progress=False)
    forms = pm._traces._traces
    calls: list[dict[str, Any]] = [{"flag": True}, {"flag": False}, {"scale": 2.0}, {"scale": 3.0}, {"scale": 2.0, "flag": False}]
    calls += [{"labels": labels} for labels in (classes, nn.functional.one_hot(classes, 3).double(), classes)]
    for arguments in calls:
        torch.testing.assert_close(pm(x, **arguments), model(x, **arguments), msg=str(arguments))
    assert sum(map(len, forms.values())) == 6  # the example's, one flag, two scales, two kinds of labels
    with pytest.raises(ConfigError, match=r"labels has dtype torch\.int32; the model was traced with torch\.int64"):
        pm(x, labels=classes.int())
    with pytest.raises(ConfigError, match=r"x has dtype torch\.float32"):
        pm(x.float())


def test_a_default_that_is_passed_is_that_of_the_trace() -> None:
    model, x = Scaled().double(), torch.rand(6, 4, dtype=torch.float64)
    pm = partition(model, devices=2, mode="model", example_inputs=(x,), example_kwargs={"scale": 1.0, "flag": True}, progress=False)
    for arguments in ({"flag": True}, {"scale": 1.0, "flag": True}, {}):
        torch.testing.assert_close(pm(x, **arguments), model(x, **arguments))
    assert sum(map(len, pm._traces._traces.values())) == 2


def test_values_that_change_in_every_call_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partitioner.specialize.traces._TRACES_ANNOUNCED", 3)
    monkeypatch.setattr("partitioner.specialize.traces._TRACES_KEPT", 4)
    model, x = Scaled().double(), torch.rand(6, 4, dtype=torch.float64)
    pm = partition(model, devices=2, mode="model", example_inputs=(x,), progress=False)
    pm(x, scale=2.0)
    with pytest.warns(PartitionWarning, match="traced for 3 kinds of calls"):
        pm(x, scale=3.0)
    for scale in (4.0, 5.0, 2.0, 1.0):
        torch.testing.assert_close(pm(x, scale=scale), model(x, scale=scale))
    assert [len(each) for each in pm._traces._traces.values()] == [4]


@pytest.mark.parametrize("mode", ["pipeline", *slow("tensor", "fsdp")])
def test_other_arguments_than_the_examples_are_traced_when_they_come(mode: str) -> None:
    """The same plan and the same tensors: both kinds of call train them."""
    model, x, scale, shift = Named(), torch.rand(6, 4), torch.rand(4), torch.rand(6, 4)
    pm = partition(model, devices=2, mode=mode, example_inputs=(x,), example_kwargs={"scale": scale})
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, pm)]
    for keywords in ({}, {"shift": None}, {"shift": shift}, {}):
        for module, optimizer in zip((model, pm), optimizers, strict=True):
            module(x, scale, **keywords).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(pm(x, scale, **keywords), model(x, scale, **keywords))
    square = nn.functional.mse_loss
    torch.testing.assert_close(pm.train_step(x, scale, shift, target=x, loss_fn=square), square(model(x, scale, shift), x))
    copied = copy.deepcopy(pm)
    torch.testing.assert_close(copied(x, scale, shift), model(x, scale, shift))


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_gradients_of_an_input_that_some_ranks_do_not_read(n_microbatches: int) -> None:
    """Ranks add up what they found; a rank without any gives zeros for each microbatch."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, late: Tensor) -> Tensor:
            y: Tensor = self.last(self.first(x).tanh() * late)
            return y

    torch.manual_seed(0)
    model, given = Late().double(), [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    pm = partition(copy.deepcopy(model), 2, "pipeline", example_inputs=tuple(given), n_microbatches=n_microbatches)
    ours, theirs = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    pm(*ours).pow(2).sum().backward()
    model(*theirs).pow(2).sum().backward()
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-9, atol=1e-9)
