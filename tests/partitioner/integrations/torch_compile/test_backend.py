"""``torch.compile(model, backend="partitioner")`` computes, trains and updates as the model; or refuses, by name."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, TraceError, partition
from partitioner.integrations.torch_compile import backend, partitioner_backend
from tests.partitioner.integrations.torch_compile import networks
from tests.partitioner.integrations.torch_compile.networks import (
    WIDTH,
    Breaking,
    Checkpointed,
    Custom,
    Heads,
    Normalized,
    Plain,
    compare_training,
    twins,
)
from tests.support.processes.processes import Workers

BATCHES = [(4, WIDTH), (4, WIDTH), (6, WIDTH)]
TENSOR: dict[str, Any] = {"devices": 2, "mode": "tensor"}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def partitioned(monkeypatch: pytest.MonkeyPatch) -> list[PartitionedModel]:
    """Return the models that the backend makes, in their order."""
    models: list[PartitionedModel] = []

    def recording(*args: Any, **keywords: Any) -> PartitionedModel:
        models.append(partition(*args, **keywords))
        return models[-1]

    monkeypatch.setattr(backend, "partition", recording)
    return models


def compiled(model: nn.Module, options: dict[str, Any] | None = None, **keywords: Any) -> Any:
    return torch.compile(model, backend="partitioner", options=options or TENSOR, **keywords)


@pytest.mark.slow
def test_weights_gradients_and_buffers_are_the_models_own(partitioned: list[PartitionedModel]) -> None:
    model, expected = twins(Normalized)
    compare_training(compiled(model, fullgraph=True), expected, model, BATCHES, times=3)
    assert [pm.plan.n_ranks for pm in partitioned] == [2, 2]  # one for a batch of 4, one for all
    assert any("all_" in pm.graph(0).code for pm in partitioned)
    names = [name for name, _ in partitioned[0].named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    model.eval()
    expected.eval()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), expected(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Checkpointed, Plain, Custom])
def test_what_dynamo_writes_as_graphs_of_their_own(kind: type[nn.Module]) -> None:
    model, expected = twins(kind)
    compare_training(compiled(model, {"devices": 2, "mode": "data"}, fullgraph=True), expected, model, [(4, WIDTH)])


@pytest.mark.slow
def test_parts_between_graph_breaks_are_partitioned_one_by_one(partitioned: list[PartitionedModel]) -> None:
    model, expected = twins(Breaking)
    with pytest.warns(UserWarning, match=r"breaks into parts at .*networks\.py:\d+ .*graph_break") as caught:
        compare_training(compiled(model), expected, model, [(4, WIDTH)])
    assert len(partitioned) == 2  # the part between them has no parameters
    assert sum("breaks into parts" in str(warning.message) for warning in caught) == 1
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        compiled(twins(Breaking)[0], fullgraph=True)(torch.randn(4, WIDTH, dtype=torch.float64))


@pytest.mark.slow
def test_an_open_batch_is_cut_into_microbatches(partitioned: list[PartitionedModel]) -> None:
    model, expected = twins(Heads)
    options = {"devices": 2, "mode": "pipeline", "n_microbatches": 2}
    x = torch.randn(6, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"(?s)microbatches.*dynamic=True"):
        compiled(model, options)(x)
    partitioned.clear()
    compare_training(compiled(model, options, dynamic=True), expected, model, [(6, 3, WIDTH), (8, 3, WIDTH), (8, 5, WIDTH)])
    assert len(partitioned) == 2  # one for each length: the batch is open in both


def test_an_open_batch_of_mark_dynamic(partitioned: list[PartitionedModel]) -> None:
    model, expected = twins(Plain)
    run = compiled(model, fullgraph=True)

    def marked(x: Tensor) -> Any:
        torch._dynamo.mark_dynamic(x, 0)
        return run(x)

    for rows in (6, 8):
        x = torch.randn(rows, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(marked(x)["y"], expected(x)["y"])
    assert len(partitioned) == 1


@pytest.mark.slow
def test_other_weights_in_a_functional_call() -> None:
    model, expected = twins(Plain)
    run = torch.compile(lambda weights, x: torch.func.functional_call(model, weights, (x,))["y"], backend="partitioner", options=TENSOR)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    sets = [{name: nn.Parameter(p.detach() * factor) for name, p in expected.named_parameters()} for factor in (1, 2)]
    results = [run(weights, x) for weights in sets]  # both before the backward of either
    expected_results = [torch.func.functional_call(expected, dict[str, Tensor](weights), (x,))["y"] for weights in sets]
    for result, expected_result, weights in zip(results, expected_results, sets, strict=True):
        torch.testing.assert_close(result, expected_result)
        wanted = list(weights.values())
        torch.testing.assert_close(
            torch.autograd.grad(result.sum(), wanted, allow_unused=True),
            torch.autograd.grad(expected_result.sum(), wanted, allow_unused=True),
        )


def test_what_autograd_refuses() -> None:
    model, _ = twins(Plain)
    run = compiled(model)
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    result = run(x)["y"].sum()
    with torch.no_grad():
        model.get_parameter("second.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    with pytest.raises(ConfigError, match="no derivative itself"):
        torch.autograd.grad(run(x)["y"].sum(), x, create_graph=True)


def test_autocast_around_the_call() -> None:
    model = Plain()
    x = torch.randn(4, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = compiled(model)(x)["y"], model(x)["y"]
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"options": {"devicez": 2}}, r"no option 'devicez'(?s:.*)did you mean devices"),
        ({"options": {"training": True}}, r"training is no option(?s:.*)train\(\) or eval\(\)"),
        ({"options": {"precision": "bf16-true"}}, "stay the model's own"),
        ({"options": {"devices": 2, "mode": "pipelin"}}, "pipeline"),
        ({"mode": "tensor"}, r'options=\{"mode": "tensor"\}'),
    ],
)
def test_options_that_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torch.compile(twins(Plain)[0], backend="partitioner", **keywords)(torch.randn(4, WIDTH, dtype=torch.float64))


def test_a_partitioned_model_is_not_partitioned_again() -> None:
    x, first, last = torch.randn(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    pm = partition(first, 2, "tensor", example_inputs=(x,))
    torch.testing.assert_close(compiled(nn.Sequential(pm, last))(x), last(first(x)))
    with pytest.raises(TraceError, match="partitioned again"):
        partition(nn.Sequential(pm, last), 2, "tensor", example_inputs=(x,))


def test_many_sizes_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_MANY", 1)
    run = compiled(twins(Normalized)[0].eval(), dynamic=True)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x, times=2)
    with pytest.warns(UserWarning, match="partitioned 1 times for different values of"):
        run(x, times=3)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["fsdp", "tensor", "pipeline"])
def test_processes(workers: Callable[[int], Workers], mode: str) -> None:
    assert workers(2).values(networks.train_in_processes, mode, timeout=180) == [None, None]


def test_the_backend_is_declared() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="partitioner")
    assert entry.load() is partitioner_backend
    assert "partitioner" in torch._dynamo.list_backends()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["model", "pipeline", "data", "fsdp", "tensor", {"data": 2, "tensor": 2}])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", [Plain, Normalized, Heads])
def test_every_mode(kind: type[nn.Module], dynamic: bool | None, mode: Any) -> None:
    model, expected = twins(kind)
    inner = (3, WIDTH) if kind is Heads else (WIDTH,)
    shapes = [(rows, *inner) for rows in (6, 6, 8)]
    options = {"devices": 4 if isinstance(mode, dict) else 2, "mode": mode}
    compare_training(compiled(model, options, fullgraph=True, dynamic=dynamic), expected, model, shapes)
