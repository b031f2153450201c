"""``torch.compile(pm)`` runs ``pm``: before and after its first call, in training and evaluation, as one graph, for any batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, partition
from partitioner.runtime.compiled import opaque_call

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
@pytest.mark.parametrize("fullgraph", [False, True])
def test_training_and_evaluation(*, is_called_before: bool, fullgraph: bool) -> None:
    model = Net().double()
    pm = partitioned(model, example_kwargs=FLAG)
    if is_called_before:
        compare_step(pm, pm, model, 4)
    compiled = torch.compile(pm, backend="aot_eager", fullgraph=fullgraph)
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
    with pytest.raises(ConfigError, match="has not been called in these modes"):
        compiled(x, flag=True)
    torch.testing.assert_close(pm(x, flag=True)["y"], model(x)["y"])
    torch.testing.assert_close(compiled(x, flag=True)["y"], model(x)["y"])
    model.train()
    pm.train()
    compare_step(compiled, pm, model, 6)


@pytest.mark.slow
def test_compile_in_place() -> None:
    model = Net().double()
    pm = partitioned(model, example_kwargs=FLAG)
    pm.compile(backend="aot_eager", fullgraph=True)
    for rows in (4, 6):
        compare_step(pm, pm, model, rows)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_inside_of_another_module(*, fullgraph: bool) -> None:
    inner, head = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 2).double()
    pm = partitioned(inner)
    compiled = torch.compile(nn.Sequential(pm, nn.ReLU(), head), backend="aot_eager", fullgraph=fullgraph)
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
def test_calls_before_their_backwards_and_dropped_results() -> None:
    model = nn.Linear(WIDTH, WIDTH).double()
    pm = partitioned(model)
    compiled = torch.compile(pm, backend="aot_eager", fullgraph=True)
    inputs = [batch(4), batch(4)]
    losses = [compiled(x).pow(2).sum() for x in inputs]
    dropped = compiled(inputs[0])
    del dropped
    gc.collect()
    assert len([saved for saved in opaque_call._saved.values() if saved.results]) == 2
    for loss in losses:
        loss.backward()
    for x in inputs:
        model(x).pow(2).sum().backward()
    torch.testing.assert_close(pm.full_gradients(), {name: p.grad for name, p in model.named_parameters()})
    assert not [saved for saved in opaque_call._saved.values() if saved.results]


@pytest.mark.slow
def test_accumulation_without_communication() -> None:
    model = nn.Linear(WIDTH, WIDTH).double()
    pm = partitioned(model, "data")
    compiled = torch.compile(pm, backend="aot_eager", fullgraph=True)
    inputs = [batch(4), batch(4)]
    with pm.no_sync():
        compiled(inputs[0]).pow(2).sum().backward()
    compiled(inputs[1]).pow(2).sum().backward()
    for x in inputs:
        model(x).pow(2).sum().backward()
    torch.testing.assert_close(pm.full_gradients(), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.slow
def test_a_model_that_is_traced_for_each_batch_size() -> None:
    model = Fixed().double()
    pm = partitioned(model)
    compiled = torch.compile(pm, backend="aot_eager", fullgraph=True)
    x, other = batch(4), batch(3)
    torch.testing.assert_close(compiled(x), model(x))
    with pytest.warns(UserWarning, match="3 rows are new"), pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(other)
    torch.testing.assert_close(pm(other), model(other))
    torch.testing.assert_close(compiled(other), model(other))


@pytest.mark.slow
def test_errors_are_those_without_a_compiler() -> None:
    pm = partitioned(Net().double(), example_kwargs=FLAG)
    compiled = torch.compile(pm, backend="aot_eager", fullgraph=True)
    with pytest.raises(ConfigError, match=r"x has dtype torch\.float32"):
        compiled(batch(4).float(), flag=True)
    with pytest.raises(ConfigError, match="flag was True"):
        compiled(batch(4), flag=False)
    loss = compiled(batch(4), flag=True)["y"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="has run already"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["pipeline", "tensor", "fsdp"])
def test_inductor(mode: str) -> None:
    model = Net().double()
    pm = partitioned(model, mode, example_kwargs=FLAG)
    compiled = torch.compile(pm, fullgraph=True)
    for rows in (4, 6):
        compare_step(compiled, pm, model, rows)


class Asking(nn.Module):
    """Computes otherwise where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return 2 * y if torch.is_grad_enabled() else y


@pytest.mark.slow
def test_a_trace_without_gradients_is_made_before_the_compiled_call() -> None:
    model = Asking().double()
    pm, x = partitioned(model), batch(4)
    compiled = torch.compile(pm, backend="aot_eager")
    with torch.no_grad():
        with pytest.raises(ConfigError, match="call pm once so"):
            compiled(x)
        pm(x)
        torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(x), model(x))
