"""``torch.func.functional_call``: a partitioned model computes with tensors of the caller's, and has its own again afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from partitioner import ConfigError, partition
from tests.partitioner.model.module.functional_cases import SOME, Mode, difference, differences_in_processes, pair, values_for
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import slow


@pytest.mark.parametrize("names", [*slow(None), SOME], ids=["all", "some"])
@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize("mode", ["fsdp", *slow("data", "tensor", "pipeline", {"data": 2, "tensor": 2})], ids=str)
def test_in_one_process(mode: Mode, training: bool, names: tuple[str, ...] | None) -> None:
    difference(mode, training=training, names=names)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "fsdp"])
@pytest.mark.usefixtures("devices_apart")
def test_parts_on_several_devices(mode: Mode) -> None:
    difference(mode, training=True)


@pytest.mark.parametrize("trained_first", [True, *slow(False)])
def test_in_other_modes_than_it_was_partitioned_in(trained_first: bool) -> None:
    """Running statistics, written in one of the modes only, are the caller's."""
    model, pm, x = pair("data", training=trained_first)
    values = values_for(model)
    found = []
    for module in (model, pm):
        module.train(not trained_first)
        given = {name: value.clone() for name, value in values.items()}
        found.append((functional_call(module, given, (x,)).detach(), given, module(x).detach()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def test_other_shapes_and_steps_are_refused() -> None:
    _, pm, x = pair("fsdp", training=True)
    with pytest.raises(ConfigError, match=r"gives first\.weight as \(4, 6\) torch\.float64, and the model has \(8, 6\) torch\.float64"):
        functional_call(pm, {"first.weight": torch.rand(4, 6).double()}, (x,))
    with pytest.raises(ConfigError, match=r"gives scale as \(8,\) torch\.float32"):
        functional_call(pm, {"scale": torch.rand(8)}, (x,))

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = pm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pm.train_step(x, target=None, loss_fn=lambda y, _: y.sum())

    with pytest.raises(ConfigError, match=r"first\.bias was replaced, as torch\.func\.functional_call does"):
        functional_call(Step(), {"inner.first.bias": torch.rand(8).double()}, (x,))
    pm(x)  # it is as before


def test_gradients_that_would_be_others_are_refused() -> None:
    _, pm, x = pair("fsdp", training=True)
    weight = torch.rand(8, 6).double().requires_grad_()
    hook = pm.get_parameter("last.bias").register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ConfigError, match=r"would call the hooks of last\.bias"):
        functional_call(pm, {"first.weight": weight}, (x,))
    hook.remove()
    pm.get_parameter("first.weight").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"asks for the gradient of first\.weight, which is frozen"):
        functional_call(pm, {"first.weight": weight}, (x,))
    functional_call(pm, {"first.weight": weight.detach()}, (x,)).sum().backward()
    assert pm.get_parameter("last.weight").grad is not None


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).tanh())
        return result


@pytest.mark.parametrize("mode", ["tensor", *slow("pipeline")])
def test_slices_of_a_vector_and_tied_weights(mode: str) -> None:
    """As methods that learn to learn, or look at losses along a line, keep parameters."""
    torch.manual_seed(0)
    model, x = Tied().double(), torch.randn(4, 6, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), progress=False)
    found = []
    for module in (model, pm):
        vector = torch.linspace(-1, 1, 42, dtype=torch.float64).requires_grad_()
        given = {"up.weight": vector[:36].view(6, 6).t(), "up.bias": vector[36:]}
        functional_call(module, given, (x,)).square().sum().backward()
        found.append(vector.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
    with pytest.raises(ConfigError, match="which are tied, different tensors"):
        functional_call(pm, {"up.weight": torch.rand(6, 6).double(), "down.weight": torch.rand(6, 6).double()}, (x,), tie_weights=False)


def test_transforms_of_functions_are_refused() -> None:
    model, pm, x = pair("data", training=False)
    values = values_for(model)
    calls: list[Callable[[], object]] = [
        lambda: grad(lambda given: functional_call(pm, given, (x,)).sum())(values),
        lambda: grad(lambda rows: pm(rows).sum())(x),
        lambda: vmap(pm)(x.repeat(2, 1, 1)),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"torch\.func \(grad, vmap, jacrev, \.\.\.\) cannot transform a partitioned model"):
            call()
    torch.testing.assert_close(pm(x), model(x), rtol=1e-9, atol=1e-11)


def test_compiled_code_around_it() -> None:
    model, pm, x = pair("data", training=False)
    compiled = torch.compile(lambda given, rows: functional_call(pm, given, (rows,)), backend="eager")
    values = values_for(model)
    torch.testing.assert_close(compiled(values, x), functional_call(model, values, (x,)), rtol=1e-9, atol=1e-11)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "size"), [("fsdp", 2), ("tensor", 2), ("pipeline", 2), ("data", 2), ({"data": 2, "tensor": 2}, 4)], ids=str
)
def test_in_processes(mode: Mode, size: int, workers: Callable[[int], Workers]) -> None:
    said = workers(size).values(differences_in_processes, mode, timeout=170)
    refused = "functional_call with gradients does not give first.bias, norm.weight"
    assert all(each.startswith(refused) if mode != "data" else not each for each in said), said
