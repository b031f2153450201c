"""Writes of forward into its arguments reach the caller's tensors, in every mode and both runtimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from passes.ir.errors import ConfigError
from tests.support.processes.processes import Workers
from tests.support.running.effects import WRITES, How, Writes, writes_difference

CASES: list[Any] = [
    pytest.param("slice", "backward", 2, "model", {}, marks=pytest.mark.slow),
    ("slice", "train_step", 2, "pipeline", {"n_microbatches": 2}),
    pytest.param("returned", "no_grad", 2, "pipeline", {"n_microbatches": 2}, marks=pytest.mark.slow),
    pytest.param("returned", "backward", 2, "data", {}, marks=pytest.mark.slow),
    pytest.param("by_index", "backward", 2, "fsdp", {}, marks=pytest.mark.slow),
    ("through_a_view", "backward", 2, "tensor", {}),
    ("after_a_copy", "no_grad", 2, "model", {}),
    ("nested", "train_step", 2, "data", {}),
    pytest.param("nested", "backward", 2, "pipeline", {"n_microbatches": 2}, marks=pytest.mark.slow),
    pytest.param("mean_of_rows", "backward", 2, "pipeline", {}, marks=pytest.mark.slow),
    ("mean_of_rows", "train_step", 2, "data", {}),
    pytest.param("transposed", "backward", 2, "model", {}, marks=pytest.mark.slow),
]
HOWS: tuple[How, ...] = ("no_grad", "backward", "train_step")
ALL: list[tuple[str, How, int, Any, dict[str, Any]]] = [
    (name, how, 4 if isinstance(mode, dict) else 2, mode, {})
    for name in WRITES
    for how in HOWS
    for mode in ("model", "pipeline", "data", "fsdp", "tensor", {"data": 2, "pipeline": 2})
]


@pytest.mark.parametrize(("name", "how", "devices", "mode", "options"), CASES)
def test_writes(name: str, how: How, devices: int, mode: Any, options: dict[str, Any]) -> None:
    assert writes_difference(name, how, devices, mode, options) is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how", "devices", "mode", "options"), ALL)
def test_writes_in_every_mode(name: str, how: How, devices: int, mode: Any, options: dict[str, Any]) -> None:
    assert writes_difference(name, how, devices, mode, options) is None


@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "how", "mode", "options"),
    [
        pytest.param("slice", "train_step", "pipeline", {"n_microbatches": 2}, marks=pytest.mark.slow),
        ("returned", "no_grad", "pipeline", {"n_microbatches": 2}),
        ("nested", "backward", "data", {}),
    ],
)
def test_writes_of_processes(workers: Callable[[int], Workers], name: str, how: How, mode: Any, options: dict[str, Any]) -> None:
    assert workers(2).values(writes_difference, name, how, 2, mode, options, timeout=120) == [None] * 2


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        state.add_(x)
        return self.layers(state)  # type: ignore[no-any-return]


def _adds() -> nn.Module:
    return partition(Adds(), 2, "model", example_inputs=(torch.zeros(2, 4), torch.zeros(2, 4)))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (torch.zeros(1, 4).expand(2, 4), "several elements are one in memory"),
        (torch.zeros(2, 4, requires_grad=True), "a leaf tensor that requires a gradient"),
        (torch.zeros(2, 4, requires_grad=True).view(2, 4), "a leaf tensor that requires a gradient"),
    ],
    ids=["expanded", "leaf", "view_of_a_leaf"],
)
def test_tensors_that_cannot_be_written_are_refused(state: Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _adds()(torch.ones(2, 4), state)


def test_arguments_in_one_memory_are_refused_where_they_overlap() -> None:
    pm, memory = _adds(), torch.ones(2, 8)
    with pytest.raises(ConfigError, match="state, which shares memory with x"):
        pm(memory[:, 2:6], memory[:, :4])
    with torch.no_grad():
        pm(memory[:, 4:], memory[:, :4])
    assert torch.equal(memory, torch.tensor([2.0] * 4 + [1.0] * 4).expand(2, 8))


def test_tensors_of_inference_mode_are_written() -> None:
    pm = _adds()
    with torch.inference_mode():
        state = torch.zeros(2, 4)
        pm(torch.ones(2, 4), state)
    assert torch.equal(state, torch.ones(2, 4))


def test_a_write_that_mixes_rows_keeps_the_batch_in_one_piece() -> None:
    def write(model: Writes, x: Tensor, largest: Tensor) -> Tensor:
        largest.copy_(x.amax((0, 1)))
        result: Tensor = model.second(model.first(x))
        return result

    example = (torch.zeros(4, 3, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ConfigError, match="the new value of input state"):
        partition(Writes(write), 2, "pipeline", example_inputs=example, n_microbatches=2)
