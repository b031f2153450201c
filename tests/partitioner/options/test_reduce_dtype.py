"""``reduce_dtype=``: the type in which gradients of parameters are summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, PartitionedModel, Plan, partition
from passes.ir.comm.primitives import all_gather, all_reduce, reduce_scatter
from passes.ir.errors import ConfigError
from tests.support.processes.processes import Workers

functional = nn.functional
Mode = str | Mapping[str, int]
ROWS = 8


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 8, bias=False))


def tied() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)), nn.Linear(16, 8))
    layers[2].weight = layers[0].weight
    return layers


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 16, generator=generator), torch.randn(ROWS, 8, generator=generator)


def partitioned(devices: int, mode: Mode, model: Callable[[], nn.Module] = perceptron, **options: Any) -> PartitionedModel:
    given = {"precision": "bf16-mixed", "reduce_dtype": "bfloat16", "progress": False, **options}
    return partition(model(), devices, mode, example_inputs=(example()[0],), **given)


def step(pm: PartitionedModel) -> PartitionedModel:
    x, target = example()
    pm.train_step(x, target=target, loss_fn=functional.mse_loss)
    return pm


def parts_of_gradients(model: Callable[[], nn.Module], n_ranks: int, dtype: torch.dtype | None) -> dict[str, list[Tensor]]:
    """Return the gradients of each rank's rows under autocast."""
    parts: dict[str, list[Tensor]] = {}
    for x, target in zip(*(tensor.chunk(n_ranks) for tensor in example()), strict=True):
        replica = model()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = functional.mse_loss(replica(x), target) / n_ranks
        loss.backward()
        for name, parameter in replica.named_parameters():
            assert parameter.grad is not None
            parts.setdefault(name, []).append(parameter.grad)
    return parts


def messages(pm: PartitionedModel) -> list[tuple[str, torch.dtype, int]]:
    """Return collective, type and bytes of each message of the step, without the loss."""
    found = []
    for node in pm.graph(0).graph.nodes:
        if node.target in (all_gather, all_reduce, reduce_scatter) and node.meta.get("reduces") != ("loss_of_batch",):
            value = node.args[0][0].meta.get("val")  # gradients that microbatches have added up have none
            found.append((node.target.__name__, torch.float32 if value is None else value.dtype, node.meta["bytes"]))
    return found


MODES: list[Any] = [
    (2, "data", {}),
    pytest.param(2, "fsdp", {"recompute": "full"}, marks=pytest.mark.slow),
    pytest.param(2, "fsdp", {"precision": None}, marks=pytest.mark.slow),
    pytest.param(2, "data", {"precision": None}, marks=pytest.mark.slow),
    pytest.param(2, "zero1", {}, marks=pytest.mark.slow),
    pytest.param(2, "zero2", {}, marks=pytest.mark.slow),
    pytest.param(2, "fsdp", {"reduce_dtype": torch.float16}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("devices", "mode", "options"), MODES)
def test_gradients_are_cast_summed_and_cast_back(devices: int, mode: Mode, options: dict[str, Any]) -> None:
    """As DistributedDataParallel's and FSDP2's reductions in a smaller type."""
    dtype = torch.float16 if "reduce_dtype" in options else torch.bfloat16
    found = step(partitioned(devices, mode, **options)).full_gradients()
    of_ranks = parts_of_gradients(perceptron, devices, None if "precision" in options else torch.bfloat16)
    for name, parts in of_ranks.items():
        expected = (parts[0].to(dtype) + parts[1].to(dtype)).float()
        gradient = found[name]
        assert gradient is not None
        assert gradient.dtype == torch.float32
        # A part is that of a replica up to the rounding of float32, which may round to the next number of the smaller type.
        close = (gradient - expected).abs() <= 2 * torch.finfo(dtype).eps * parts[0].abs().max()
        assert close.all()
        assert torch.equal(gradient, gradient.to(dtype).float())


@pytest.mark.parametrize(
    ("devices", "mode", "options"),
    [
        pytest.param(2, "data", {}, marks=pytest.mark.slow),
        (2, "fsdp", {}),
        pytest.param(4, {"data": 2, "fsdp": 2}, {}, marks=pytest.mark.slow),
        pytest.param(2, "data", {"n_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2, "data": 2}, {"n_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"data": 2, "tensor": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_messages_are_as_many_and_half_as_large(devices: int, mode: Mode, options: dict[str, Any]) -> None:
    wide, narrow = (step(partitioned(devices, mode, **{"reduce_dtype": dtype, **options})) for dtype in (None, "bfloat16"))
    before, after = messages(wide), messages(narrow)
    assert len(before) == len(after)
    for (name, dtype, size), (same, found, sent) in zip(before, after, strict=True):
        halved = name != "all_gather" and dtype == torch.float32
        assert (same, found, sent) == (name, torch.bfloat16 if halved else dtype, size // 2 if halved else size)
    assert torch.bfloat16 in {dtype for name, dtype, _ in after if name != "all_gather"}
    narrow.verify()


@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_steps_with_large_messages_are_shorter(mode: Mode) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), torch.zeros(4, 4096)
    wide, narrow = (
        partition(model, 2, mode, example_inputs=(x,), cluster="l4:1x2", precision="bf16-mixed", reduce_dtype=dtype, progress=False)
        for dtype in (None, "bfloat16")
    )
    assert narrow.plan.step_time < wide.plan.step_time
    assert narrow.simulate().step_time < wide.simulate().step_time


def test_a_wider_type_than_the_parameters() -> None:
    pm = step(partitioned(2, "fsdp", precision="bf16-true", reduce_dtype="float32"))
    assert {dtype for name, dtype, _ in messages(pm) if name == "reduce_scatter"} == {torch.float32}
    assert {gradient.dtype for gradient in pm.full_gradients().values() if gradient is not None} == {torch.bfloat16}


def test_tied_weights_of_stages_are_summed_in_it() -> None:
    pm = step(partitioned(2, "pipeline", tied, n_microbatches=2, constraints=Constraints(split_spec={"2": "beginning"})))
    assert ("all_reduce", torch.bfloat16) in {(name, dtype) for name, dtype, _ in messages(pm)}
    exact = tied()
    functional.mse_loss(exact(example()[0]), example()[1]).backward()
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        found = pm.full_gradients()[name]
        assert found is not None
        assert (found - parameter.grad).norm() < 0.03 * parameter.grad.norm()


def test_microbatches_accumulate_in_float32() -> None:
    """The sum of the microbatches' gradients is cast once."""
    pm = step(partitioned(2, "data", n_microbatches=4))
    parts = parts_of_gradients(perceptron, 8, torch.bfloat16)
    for name, gradients in parts.items():
        ranks = [torch.stack(gradients[place : place + 4]).sum(0).bfloat16() for place in (0, 4)]
        found = pm.full_gradients()[name]
        assert found is not None
        assert ((found - (ranks[0] + ranks[1]).float()).abs() <= 2 * torch.finfo(torch.bfloat16).eps * ranks[0].abs().max()).all()
    assert [dtype for name, dtype, _ in messages(pm) if name == "all_reduce"] == [torch.bfloat16]


# -- where it is said --------------------------------------------------------------------------------------------------------------


def test_the_plan_has_it() -> None:
    pm = partitioned(2, "fsdp")
    plan = Plan.from_json(pm.plan.to_json())
    assert plan == pm.plan
    assert plan.reduce_dtype == "bfloat16"
    assert "in bfloat16, by reduce_dtype=" in pm.explain()


@pytest.mark.slow
def test_models_of_the_same_plan_have_it() -> None:
    pm = partitioned(2, "fsdp")
    plan = Plan.from_json(pm.plan.to_json())
    other = partitioned(2, "fsdp", reduce_dtype=None)
    assert pm.plan.hash != other.plan.hash
    again = step(partition(perceptron(), 2, plan=plan, example_inputs=(example()[0],), precision="bf16-mixed", progress=False))
    assert torch.bfloat16 in {dtype for name, dtype, _ in messages(again) if name == "reduce_scatter"}
    assert "reduce_dtype" not in other.explain()


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("bf16", "pass 'bfloat16'"),
        ("bfloat", "pass 'bfloat16'"),
        (torch.int8, "choose one of bfloat16"),
        (torch.float64, "float32"),
        ("float64", "choose one of bfloat16"),
    ],
)
def test_unknown_types_are_refused(value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match="reduce_dtype") as caught:
        partitioned(2, "data", reduce_dtype=value)
    assert remedy in str(caught.value)


def test_a_wrong_entry_of_a_plan_is_named() -> None:
    text = partitioned(2, "data").plan.to_json().replace('"reduce_dtype": "bfloat16"', '"reduce_dtype": "int8"')
    with pytest.raises(ConfigError, match="reduce_dtype"):
        partitioned(2, "data", plan=Plan.from_json(text))


# -- processes ---------------------------------------------------------------------------------------------------------------------


def accumulated(mode: Mode) -> dict[str, Tensor | None]:
    """Return gradients of two equal steps, the first without communication where replicas hold whole gradients."""
    pm = partitioned(2, mode)
    with pm.no_sync():
        step(pm)
    return step(pm).full_gradients()


@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_processes_sum_what_they_have_accumulated(workers: Callable[[int], Workers], mode: str) -> None:
    once = step(partitioned(2, mode)).full_gradients()
    for found in workers(2).values(accumulated, mode, timeout=120):
        for name, gradient in once.items():
            twice = found[name]
            assert gradient is not None
            assert torch.allclose(twice, 2 * gradient, atol=0.02 * float(gradient.abs().max()))
            assert torch.equal(twice, twice.bfloat16().float())
