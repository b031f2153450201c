"""``torch.func.functional_call`` of a partitioned model beside that of the model, in one process and in several."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError

Mode = str | Mapping[str, int]

SOME = ("first.weight", "scale")
"""A parameter and a buffer."""


class Net(nn.Module):
    """Its backward reads a buffer; it writes running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        assert isinstance(self.scale, Tensor)
        result: Tensor = self.last(self.norm(self.first(x)).tanh() * self.scale) * factor
        return result


def pair(mode: Mode, *, training: bool) -> tuple[Net, PartitionedModel, Tensor]:
    """Return a model, its partition, and inputs."""
    torch.manual_seed(0)
    model = Net().double().train(training)
    x = torch.randn(8, 6, dtype=torch.float64)
    devices = 2 if isinstance(mode, str) else 4
    return model, partition(copy.deepcopy(model), devices, mode, example_inputs=(x,), progress=False), x


def values_for(model: nn.Module) -> dict[str, Tensor]:
    """Other values of all parameters and floating-point buffers."""
    draw = torch.Generator().manual_seed(1)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: torch.rand(each.shape, generator=draw, dtype=each.dtype) for name, each in named if each.is_floating_point()}


def outcome(module: nn.Module, given: Mapping[str, Tensor], x: Tensor, trained: Sequence[str]) -> dict[str, Any]:
    """Return results and gradients of two calls with other tensors, and of a call with the module's own whose backward comes last."""
    values = {name: value.clone().requires_grad_(name in trained) for name, value in given.items()}
    inputs = x.clone().requires_grad_()
    own = module(x * 3).sum()
    first, second = (functional_call(module, values, (inputs * count,), {"factor": 0.5}) for count in (1, 2))
    (first.square().sum() + second.sum()).backward()
    own.backward()
    with torch.no_grad():
        last = functional_call(module, values, (x,))
        after = module(x)
    return {
        "results": [first.detach(), second.detach(), last, after],
        "gradients": {name: value.grad for name, value in values.items()},
        "of inputs": inputs.grad,
        "values": {name: value.detach() for name, value in values.items()},
    }


def difference(mode: Mode, *, training: bool, names: Sequence[str] | None = None) -> None:
    """Compare calls with all tensors, or some, with those of the model; then the state of the modules, and gradients of their own."""
    model, pm, x = pair(mode, training=training)
    trained = [name for name, _ in model.named_parameters()]
    given = values_for(model)
    given = given if names is None else {name: given[name] for name in names}
    torch.testing.assert_close(outcome(pm, given, x, trained), outcome(model, given, x, trained), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(dict(pm.full_state_dict()), dict(model.state_dict()), rtol=1e-9, atol=1e-11)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(dict(pm.full_gradients()), expected, rtol=1e-9, atol=1e-11)


def differences_in_processes(mode: Mode) -> str:
    """Compare; return what is said of gradients of parameters that are not given."""
    for training in (True, False):
        difference(mode, training=training)
    _, pm, x = pair(mode, training=False)
    given = values_for(Net().double())
    some = {name: given[name] for name in SOME}
    with torch.no_grad():
        functional_call(pm, some, (x,))
    try:
        functional_call(pm, some, (x,))
    except ConfigError as error:
        return error.problem
    return ""
