"""``pm.no_sync()``: gradients of several batches, summed over ranks once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from passes.ir.comm import primitives as communication
from tests.support.running.slow_values import slow

BATCHES = 3


def model() -> nn.Module:
    """Return a weight that is used twice, a norm, and a layer that is frozen."""
    torch.manual_seed(0)
    twice = nn.Linear(6, 6)
    layers = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), twice, nn.GELU(), twice, nn.Linear(6, 3)).double()
    layers[0].bias.requires_grad_(False)
    return layers


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.rand(4, 4, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)) for _ in range(BATCHES)]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def expected(original: nn.Module) -> dict[str, Tensor | None]:
    reference = copy.deepcopy(original)
    for x, target in batches():
        square(reference(x), target).backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters()}


def made(mode: str | Mapping[str, int], devices: int = 2) -> PartitionedModel:
    return partition(model(), devices, mode, example_inputs=(batches()[0][0],), progress=False)


def step(pm: PartitionedModel, x: Tensor, target: Tensor, *, by_backward: bool) -> None:
    if by_backward:
        square(pm(x), target).backward()
    else:
        pm.train_step(x, target=target, loss_fn=square)


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, pm: PartitionedModel) -> Iterator[list[int]]:
    """Count the sums of parameter gradients that each run of a program starts on rank 0."""
    counts: list[int] = []
    run = pm.traced.runtime.run

    def counting(programs: Any, inputs: Any) -> object:
        nodes = programs.programs[0].module.graph.nodes
        counts.append(sum(node.target is communication.all_reduce and "store_gradients" in node.name for node in nodes))
        return run(programs, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(pm.traced.runtime, "run", counting)
        yield counts


@pytest.mark.parametrize(
    ("mode", "devices", "by_backward"),
    [
        pytest.param("data", 2, False, marks=pytest.mark.slow),
        ("data", 2, True),
        pytest.param({"data": 2, "tensor": 2}, 4, False, id="data2-tensor2-False", marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 2}, 4, True, id="data2-tensor2-True", marks=pytest.mark.slow),
        pytest.param("fsdp", 2, False, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, True, marks=pytest.mark.slow),
        pytest.param({"data": 2, "pipeline": 2}, 4, False, id="data2-pipeline2-False", marks=pytest.mark.slow),
        pytest.param({"data": 2, "pipeline": 2}, 4, True, id="data2-pipeline2-True", marks=pytest.mark.slow),
    ],
)
def test_is_the_gradient_of_all_batches(mode: str | Mapping[str, int], devices: int, by_backward: bool) -> None:
    pm = made(mode, devices)
    for index, batch in enumerate(batches()):
        with pm.no_sync() if index < BATCHES - 1 else contextlib.nullcontext():
            step(pm, *batch, by_backward=by_backward)
    assert_gradients(pm, expected(model()))


def test_sums_nothing_inside_and_once_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    pm = made("data")
    with counted(monkeypatch, pm) as counts:
        for index, batch in enumerate(batches()):
            with pm.no_sync() if index < BATCHES - 1 else contextlib.nullcontext():
                step(pm, *batch, by_backward=False)
    assert counts == [0, 0, 1]


@pytest.mark.parametrize("held", [*slow((0,), (1,), (2,)), (0, 2)])
def test_steps_may_come_in_any_order(held: tuple[int, ...]) -> None:
    """A gradient that is summed already stays what it is."""
    pm = made("data")
    for index, batch in enumerate(batches()):
        with pm.no_sync() if index in held else contextlib.nullcontext():
            step(pm, *batch, by_backward=False)
    x, target = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    step(pm, x, target, by_backward=False)
    reference = copy.deepcopy(model())
    for inputs, goal in [*batches(), (x, target)]:
        square(reference(inputs), goal).backward()
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.parametrize("set_to_none", [True, *slow(False)])
def test_what_is_cleared_is_gone(set_to_none: bool) -> None:
    pm = made("data")
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    (x, target), *_ = batches()
    with pm.no_sync():
        step(pm, x, target, by_backward=False)
    optimizer.zero_grad(set_to_none=set_to_none)
    step(pm, x, target, by_backward=False)
    reference = copy.deepcopy(model())
    square(reference(x), target).backward()
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.parametrize(("mode", "devices"), [("data", 2), pytest.param({"data": 2, "tensor": 2}, 4, marks=pytest.mark.slow)])
def test_parts_of_all_ranks_are_added_up_where_all_are_in_one_process(mode: str | Mapping[str, int], devices: int) -> None:
    """There is one ``.grad``: nothing is left to be summed, and a copy that several ranks hold counts once."""
    pm = made(mode, devices)
    with pm.no_sync():
        for batch in batches():
            step(pm, *batch, by_backward=False)
    assert_gradients(pm, expected(model()))


@pytest.mark.filterwarnings("ignore:a batch of 3 rows")
def test_a_batch_that_every_rank_computes_whole_is_added() -> None:
    pm = made("data")
    (x, target), *_ = batches()
    with pm.no_sync():
        step(pm, x, target, by_backward=False)
    step(pm, x[:3], target[:3], by_backward=False)
    reference = copy.deepcopy(model())
    for rows in (4, 3):
        square(reference(x[:rows]), target[:rows]).backward()
    assert_gradients(pm, {name: parameter.grad for name, parameter in reference.named_parameters()})


def assert_gradients(pm: PartitionedModel, exact: Mapping[str, Tensor | None]) -> None:
    gradients = pm.full_gradients()
    for name, gradient in exact.items():
        torch.testing.assert_close(gradients[name], gradient, msg=name)
