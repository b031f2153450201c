"""``torch.func.functional_call``: a partitioned model computes with tensors of the caller's, and has its own again afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import functional_call

from partitioner import ConfigError
from tests.partitioner.model.module.functional_cases import SOME, Mode, difference, differences_in_processes, pair, values_for
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import slow


@pytest.mark.parametrize("names", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize("mode", ["fsdp", *slow("data", "tensor", "pipeline", {"data": 2, "tensor": 2})], ids=str)
def test_in_one_process(mode: Mode, training: bool, names: tuple[str, ...] | None) -> None:
    difference(mode, training=training, names=names)


@pytest.mark.parametrize("mode", ["tensor", *slow("fsdp")])
@pytest.mark.usefixtures("devices_apart")
def test_parts_on_several_devices(mode: Mode) -> None:
    difference(mode, training=True)


@pytest.mark.parametrize("trained_first", [True, False])
def test_in_other_modes_than_it_was_partitioned_in(trained_first: bool) -> None:
    """What is written to in one of the modes alone, the running statistics, is that of the caller."""
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
    with pytest.raises(ConfigError, match=r"gives first\.weight with shape \(4, 6\), and the parameter has \(8, 6\)"):
        functional_call(pm, {"first.weight": torch.rand(4, 6).double()}, (x,))

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = pm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pm.train_step(x, target=None, loss_fn=lambda y, _: y.sum())

    with pytest.raises(ConfigError, match=r"first\.bias was replaced, as torch\.func\.functional_call does"):
        functional_call(Step(), {"inner.first.bias": torch.rand(8).double()}, (x,))
    pm(x)  # it is as before


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
