"""``pipe_split()`` of ``torch.distributed.pipelining`` in a model is a split point, as if ``split_spec`` named it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split

from partitioner import ConfigError, Constraints, partition
from tests.support.models.attention.gpt import Block
from tests.support.running.slow_values import slow


class Layers(nn.Module):
    """Layers that do the same, with marks after some of them."""

    def __init__(self, marks: Collection[int], make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(6))
        self.marks = marks

    def forward(self, x: Tensor) -> Any:
        if -1 in self.marks:
            pipe_split()
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index in self.marks:
                pipe_split()
        return x


def layers_of_stages(pm: Any) -> list[list[str]]:
    return [sorted({".".join(module.split(".")[:2]) for module in stage.modules if module}) for stage in pm.plan.stages]


def stages(*starts: int) -> list[list[str]]:
    ends = [*starts[1:], 6]
    return [[f"layers.{index}" for index in range(start, end)] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("mode", ["pipeline", *slow("model")])
@pytest.mark.parametrize(
    ("marks", "starts"),
    [
        ((0, 4), (0, 1, 5)),
        pytest.param((1, 2, 5), (0, 2, 3), marks=pytest.mark.slow),
        pytest.param((-1, 3, 4), (0, 4, 5), marks=pytest.mark.slow),
    ],
)
def test_stages_begin_where_it_is_called(marks: tuple[int, ...], starts: tuple[int, ...], mode: str) -> None:
    """A mark before everything, or after it, cuts nothing."""
    torch.manual_seed(0)
    model, x = Layers(marks).double(), torch.randn(6, 8, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 3, mode, example_inputs=(x,))
    assert layers_of_stages(pm) == stages(*starts)
    wanted = model(x)
    torch.testing.assert_close(pm(x), wanted)
    wanted.square().sum().backward()
    pm(x).square().sum().backward()
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.slow
def test_blocks_that_are_traced_once() -> None:
    x = torch.randn(4, 5, 16)
    pm = partition(Layers((0, 4), lambda: Block(16, 2)), 3, "pipeline", example_inputs=(x,))
    assert layers_of_stages(pm) == stages(0, 1, 5)


def test_fewer_marks_than_stages_leave_the_rest_to_the_planner() -> None:
    pm = partition(Layers((0,)), 3, "pipeline", example_inputs=(torch.randn(6, 8),))
    assert layers_of_stages(pm)[0] == ["layers.0"]
    assert len(pm.plan.stages) == 3


def test_beside_other_split_points() -> None:
    constraints = Constraints(split_spec={"layers.4": "beginning"})
    pm = partition(Layers((0,)), 3, "pipeline", example_inputs=(torch.randn(6, 8),), constraints=constraints)
    assert layers_of_stages(pm) == stages(0, 1, 4)


def test_more_marks_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipe_split\(\) makes 4 stages, the plan has 2"):
        partition(Layers((0, 2, 4)), 2, "pipeline", example_inputs=(torch.randn(6, 8),))


@pytest.mark.filterwarnings("ignore:a batch of 6 rows does not divide")
@pytest.mark.parametrize("mode", ["data", *slow("tensor", "auto", {"pipeline": 2, "data": 2})])
def test_other_modes(mode: Any) -> None:
    """Without stages it says nothing; beside other dimensions it does."""
    torch.manual_seed(0)
    model, x = Layers((1,)).double(), torch.randn(6, 8, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 4, mode, example_inputs=(x,))
    torch.testing.assert_close(pm(x), model(x))
    if isinstance(mode, dict):
        assert layers_of_stages(pm) == stages(0, 2)


def test_auto_passes_over_what_has_too_few_stages() -> None:
    x = torch.randn(6, 8)
    pm = partition(Layers((0, 2)), 2, "auto", example_inputs=(x,))
    assert len(pm.plan.stages) in (1, 3)


@pytest.mark.slow
def test_behind_a_call_of_several_results() -> None:
    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            values, indices = self.first(x).topk(4)
            pipe_split()
            return self.last(torch.cat((values, indices.to(values.dtype)), 1))

    pm = partition(Best(), 2, "pipeline", example_inputs=(torch.randn(6, 8),))
    assert pm.plan.stages[0].modules[0] == "first"
    assert pm.plan.stages[1].modules[-1] == "last"
    assert len(pm.plan.stages[0].modules) < 3
