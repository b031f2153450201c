"""Calls that read other parameters than the example: each gets a trace of its own, and the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, Constraints, partition
from tests.support.processes.processes import Workers
from tests.support.running.later_calls import MODELS, difference

Mode = str | Mapping[str, int]

_MODES: tuple[Mode, ...] = ("model", "pipeline", "data", "fsdp", "zero1", "tensor", {"pipeline": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2})

_QUICK = (("adapter", "tensor"),)


def n_devices(mode: Mode) -> int:
    return 2 if isinstance(mode, str) else 4


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(name, mode, marks=() if (name, mode) in _QUICK else pytest.mark.slow) for name in MODELS for mode in _MODES],
    ids=str,
)
def test_one_process(name: str, mode: Mode) -> None:
    assert difference(name, mode, n_devices(mode)) is None


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in MODELS for mode in ("pipeline", "fsdp", "tensor") if (name, mode) != ("late_encoder", "pipeline")],
)
def test_processes(workers: Callable[[int], Workers], name: str, mode: str) -> None:
    assert workers(2).values(difference, name, mode, 2, timeout=170) == [None] * 2


@pytest.mark.slow
@pytest.mark.gloo
def test_parameters_of_a_later_stage_that_are_read_first(workers: Callable[[int], Workers]) -> None:
    """The order of registration says nothing else than that the encoder belongs to the last stage."""
    for answer in workers(2).call(difference, "late_encoder", "pipeline", 2):
        assert isinstance(answer.error, ConfigError), answer.error
        assert "reads" in str(answer.error)
        assert "partition the model with an example" in str(answer.error)


class Reordered(nn.Module):
    """Blocks whose order an argument changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor, swap: bool = False) -> Tensor:
        x = self.first(x)
        result: Tensor = self.second(self.third(x)) if swap else self.third(self.second(x))
        return result


def test_stages_whose_first_operations_run_in_another_order() -> None:
    model, x = Reordered(), torch.randn(4, 8)
    cuts = Constraints(split_spec={"second": "beginning", "third": "beginning"})
    pm = partition(model, 3, "pipeline", example_inputs=(x,), constraints=cuts)
    for swap in (False, True):
        torch.testing.assert_close(pm(x, swap), model(x, swap))


class Images(nn.Module):
    """Takes images of one size as a tensor, of several sizes as a list, whose dimension 0 is no batch: channels."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.head = nn.Conv2d(3, 8, 3, padding=1).double(), nn.Linear(8, 6).double()
        self.register_buffer("scale", torch.rand(3, 1, 1, dtype=torch.float64))

    def forward(self, images: Tensor | list[Tensor]) -> Tensor:
        if isinstance(images, list):
            images = torch.stack([nn.functional.pad(image, (0, 8 - image.shape[2], 0, 8 - image.shape[1])) for image in images])
        result: Tensor = self.head(self.convolution(images * self.scale).relu().mean((2, 3)))
        return result


@pytest.mark.filterwarnings("ignore:a batch of 3 rows does not divide over 2 ranks")
@pytest.mark.parametrize("mode", ["fsdp", *(pytest.param(mode, marks=pytest.mark.slow) for mode in _MODES if mode != "fsdp")], ids=str)
def test_arguments_of_one_size_that_is_not_the_batch(mode: Mode) -> None:
    """The trace of the list is for three channels alone: it is not traced for the eight rows of the plan."""
    images, target = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(6)
    calls = [images, [image[:, : 5 + place % 3] for place, image in enumerate(images[:6])]]
    model = Images()
    pm = partition(model, n_devices(mode), mode, example_inputs=(images,))
    for call in calls:
        torch.testing.assert_close(pm(call), model(call))
    loss = nn.functional.cross_entropy(model(calls[1]), target)
    loss.backward()
    step = pm.train_step(calls[1], target=target, loss_fn=nn.functional.cross_entropy)
    torch.testing.assert_close(step, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.full_gradients()[name], parameter.grad)
