"""A traced graph computes what the model computes: results, all gradients, buffers, at batch sizes that were not traced."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.ir.graph import Written as WrittenInput
from tests.support.models.case import Case
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.traced import assert_equal_runs, run_model, run_traced

QUICK = ("batch_norm_convolution", "in_place", "nested_outputs")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case.name in QUICK else (pytest.mark.slow,), id=case.name) for case in ZOO]
)
def test_zoo(case: Case) -> None:
    instance = case.build(batch_size=8)
    graph = trace(instance.model, instance.args, instance.kwargs)
    assert graph.batch is not None, graph.notes
    for batch_size in (8, 1, 3):
        other = case.build(batch_size=batch_size)
        expected = run_model(instance.model, other.args, other.kwargs)
        assert_equal_runs(run_traced(graph, instance.model, other.args, other.kwargs), expected, case.tolerance)


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "batch_norm_convolution"])
def test_evaluation(name: str) -> None:
    instance = case_named(name).build()
    graph = trace(instance.model, instance.args, instance.kwargs, training=False)
    instance.model.eval()
    expected = run_model(instance.model, instance.args, instance.kwargs)
    assert_equal_runs(run_traced(graph, instance.model, instance.args, instance.kwargs), expected)


class Rotary(nn.Module):
    """A rotary table computed without gradients, from a parameter too, inside a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.frequency = nn.Parameter(torch.rand(3))

    @torch.no_grad()
    def table(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(1) * self.frequency
        with torch.enable_grad():
            offset = self.linear.bias[:3] * 2
        return torch.cat([angles.cos() + offset, angles.sin()], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table(x)


class Updates(nn.Module):
    """Updates buffers in every way: in place, through a view, by assignment, without gradients."""

    mean: Tensor
    largest: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("largest", torch.zeros(2, 4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.steps += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.largest[0] = torch.maximum(self.largest[0], x.amax(0))
        return x - self.mean


class Written(nn.Module):
    """Writes where only functional operations can follow: views of views, transposed, broadcast, of another type, into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(min=-0.5)
        y = self.linear(x)
        y[:, 1:3].transpose(0, 1)[0] = 2.0
        y[:, ::2] += y[:, 1::2]
        z = y.view(-1, 2, 3)
        z[:, 1].mul_(x[:, :3])
        total = torch.zeros(y.shape[0], dtype=torch.float64)
        total += y.sum(1).float()
        z.unsqueeze_(0)
        out = torch.empty_like(y)
        out.copy_(total.unsqueeze(1))
        out[:, 3] = y[:, 0].clone()
        out[:, :2].fill_(0.25)
        return out + z.squeeze(0).reshape(-1, 6) * x


class WritesDetached(nn.Module):
    """A write through a name without gradients changes the numbers of the name that has them, and not its history."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.detach().add_(1.0)
        return y * 2


@pytest.mark.parametrize("module", [Rotary, Updates, Written, WritesDetached])
def test_gradients_and_memory(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = module().double()
    shape = (3, 6) if module is not Updates else (4,)
    shape = shape if module is Rotary else shape[-1:]
    graph = trace(model, (torch.zeros(4, *shape, dtype=torch.float64),))
    assert graph.batch is not None
    for batch_size in (4, 1, 7):
        args: tuple[Any, ...] = (torch.randn(batch_size, *shape, dtype=torch.float64),)
        expected = run_model(model, args, {}, gradient_of_inputs=module is not Written)
        assert_equal_runs(run_traced(graph, model, args, {}, gradient_of_inputs=module is not Written), expected)


def test_only_declared_writes_of_buffers_are_in_place() -> None:
    kept = {}
    for module, shape in ((Written, (4, 6)), (WritesDetached, (4, 6)), (Updates, (4, 4))):
        graph = trace(module(), (torch.zeros(shape),))
        kept[module] = [node.name for node in graph.computing_nodes() if str(node.target).split(".")[1].endswith("_")]
    assert kept == {Written: [], WritesDetached: [], Updates: ["copy", "copy_1", "copy_2"]}


def test_the_new_value_of_an_input_that_the_model_writes_is_a_result() -> None:
    graph = trace(Written(), (torch.zeros(4, 6),))
    returned, written = graph.outputs
    assert (returned.name, written.name) == ("", "x")
    assert (written.destination, written.combine, written.batch_dim) == (WrittenInput("x"), "concatenate", 0)
