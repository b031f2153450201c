"""``torch.compile(pm)`` runs ``pm``: before and after its first call, in training and evaluation, for any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, TraceError, partition

WIDTH = 4
FLAG = {"flag": True}


class Net(nn.Module):
    """Results of several kinds, a number as input, and a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor, flag: bool = True, other: Tensor | None = None) -> dict[str, Any]:
        return {"y": self.second(self.norm(self.first(x)).relu()), "rows": x.shape[0], "none": other}


class Fixed(nn.Module):
    """Its trace serves one batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(x[row]) for row in range(int(x.shape[0]))])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def partitioned(model: nn.Module, mode: str = "tensor", **keywords: Any) -> PartitionedModel:
    return partition(model, devices=2, mode=mode, example_inputs=(batch(4),), **keywords)


def batch(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64)


def compare_step(run: Any, pm: PartitionedModel, model: nn.Module, rows: int) -> None:
    """Compare a step of SGD by ``run``, which calls ``pm``, with one of the model; only ``pm`` and the model are updated."""
    x = batch(rows).requires_grad_()
    other = x.detach().clone().requires_grad_()
    result, expected = run(x, flag=True), model(other)
    assert (result["rows"], result["none"]) == (rows, None)
    torch.testing.assert_close(result["y"], expected["y"])
    for each in (result, expected):
        each["y"].pow(2).mean().backward()
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(pm.full_gradients(), {name: p.grad for name, p in model.named_parameters()})
    for parameters in (pm.parameters(), model.parameters()):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(pm.full_state_dict(), dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("is_called_before", [False, True])
def test_training_and_evaluation(*, is_called_before: bool) -> None:
    model = Net().double()
    pm = partitioned(model, example_kwargs=FLAG)
    if is_called_before:
        compare_step(pm, pm, model, 4)
    compiled = torch.compile(pm, backend="aot_eager")
    for rows in (4, 6):
        compare_step(compiled, pm, model, rows)
    with torch.no_grad():
        x = batch(4)
        result = compiled(x, flag=True)["y"]
        torch.testing.assert_close(result, model(x)["y"])
    assert not result.requires_grad
    model.eval()
    pm.eval()
    x = batch(6)
    torch.testing.assert_close(compiled(x, flag=True)["y"], model(x)["y"])
    model.train()
    pm.train()
    compare_step(compiled, pm, model, 6)


@pytest.mark.slow
def test_compile_in_place() -> None:
    model = Net().double()
    pm = partitioned(model, example_kwargs=FLAG)
    pm.compile(backend="aot_eager")
    for rows in (4, 6):
        compare_step(pm, pm, model, rows)


@pytest.mark.slow
def test_inside_of_another_module() -> None:
    inner, head = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 2).double()
    pm = partitioned(inner)
    compiled = torch.compile(nn.Sequential(pm, nn.ReLU(), head), backend="aot_eager")
    expected = nn.Sequential(inner, nn.ReLU(), head)
    for rows in (4, 6):
        x = batch(rows)
        torch.testing.assert_close(compiled(x), expected(x))
        compiled(x).sum().backward()
        gradients = [head.weight.grad, *pm.full_gradients().values()]
        head.zero_grad()
        pm.zero_grad()
        expected(x).sum().backward()
        torch.testing.assert_close(gradients, [head.weight.grad, inner.weight.grad, inner.bias.grad])
        expected.zero_grad()


@pytest.mark.slow
def test_a_model_that_is_traced_for_each_batch_size() -> None:
    model = Fixed().double()
    pm = partitioned(model)
    compiled = torch.compile(pm, backend="aot_eager")
    x, other = batch(4), batch(3)
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(other), model(other))


@pytest.mark.slow
def test_errors_are_those_without_a_compiler() -> None:
    pm = partitioned(Net().double(), example_kwargs=FLAG)
    compiled = torch.compile(pm, backend="aot_eager")
    with pytest.raises(ConfigError, match=r"x has dtype torch\.float32"):
        compiled(batch(4).float(), flag=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile around it without fullgraph=True"):
        torch.compile(pm, backend="aot_eager", fullgraph=True)(batch(4), flag=True)
    with pytest.raises(TraceError, match="exported"):
        torch.export.export(pm, (batch(4),), FLAG)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["pipeline", "tensor", "fsdp"])
def test_inductor(mode: str) -> None:
    model = Net().double()
    pm = partitioned(model, mode, example_kwargs=FLAG)
    compiled = torch.compile(pm)
    for rows in (4, 6):
        compare_step(compiled, pm, model, rows)
