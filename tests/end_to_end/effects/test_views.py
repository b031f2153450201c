"""Results that are views, and results that share memory, are written in place by the caller as those of the model, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from passes.ir.errors import ConfigError
from passes.ir.graph import Base
from tests.support.processes.processes import Workers
from tests.support.running.returned_views import RESULTS, Returns, example, views_differences

MODES: list[tuple[Any, dict[str, Any]]] = [
    ("model", {}),
    ("pipeline", {"n_microbatches": 1}),
    ("pipeline", {"n_microbatches": 2}),
    ("data", {}),
    ("tensor", {}),
    ("fsdp", {}),
]

QUICK = [
    ("unsqueezed", ("pipeline", {"n_microbatches": 2})),
    ("overlapping", ("data", {})),
    ("detached", ("data", {})),
    ("transposed", ("pipeline", {"n_microbatches": 2})),
    ("view_of_an_input", ("pipeline", {"n_microbatches": 2})),
]
"""Results and modes that always run."""

CASES = [pytest.param(name, *mode, marks=() if (name, mode) in QUICK else pytest.mark.slow) for name in RESULTS for mode in MODES]


@pytest.mark.parametrize(("name", "mode", "options"), CASES)
def test_results_that_share_memory(name: str, mode: Any, options: dict[str, Any]) -> None:
    assert views_differences(name, mode, options) == []


@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [("overlapping", "data"), ("unsqueezed", "pipeline")])
def test_results_of_processes(workers: Callable[[int], Workers], name: str, mode: str) -> None:
    options = {"n_microbatches": 2} if mode == "pipeline" else {}
    assert workers(2).values(views_differences, name, mode, options, timeout=120) == [[]] * 2


def _partition(name: str, mode: str = "data") -> Any:
    return partition(Returns(RESULTS[name]), 2, mode, example_inputs=(example(),))


def test_parts_without_a_common_element_have_no_base() -> None:
    assert [type(output.destination) for output in _partition("overlapping").traced.graph.outputs][2:] == [Base]
    assert len(_partition("apart").traced.graph.outputs) == 2


def test_an_input_that_is_returned_has_the_memory_of_the_caller() -> None:
    x = example()
    for mode in ("model", "data"):
        assert _partition("input", mode)(x)[1].data_ptr() == x.data_ptr()


class Stacked(nn.Module):
    """An image, twice, and one of the two as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 4, dilation=2, padding=1, padding_mode="circular", bias=False).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        both = torch.stack((y, y), 3)
        return both[..., -1], both


def test_views_of_tiled_values() -> None:
    torch.manual_seed(0)
    model, x = Stacked(), torch.randn(8, 2, 10, 5, dtype=torch.float64)
    pm = partition(model, 1, {"tile": 3}, example_inputs=(x,), progress=False)
    results = []
    for each in (pm, model):
        view, both = each(x)
        view.mul_(0.5)
        results.append(both)
    torch.testing.assert_close(*results)


class Counts(nn.Module):
    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        return self.layers(x) * self.scale, self.scale[:2], self.calls


@pytest.mark.parametrize(("place", "name"), [(1, "scale"), (2, "calls")])
def test_a_change_of_a_returned_buffer_is_refused(place: int, name: str) -> None:
    pm = partition(Counts(), 2, "data", example_inputs=(torch.zeros(2, 4),))
    pm(torch.zeros(2, 4))
    with torch.no_grad():
        result = pm(torch.zeros(2, 4))
        assert torch.equal(result[2], torch.tensor([2.0]))
        result[place].mul_(2)
        with pytest.raises(ConfigError, match=f"it is {name}, or a view of it"):
            pm(torch.zeros(2, 4))


@pytest.mark.slow
def test_compiled_code_sees_the_views() -> None:
    def step(model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        first, second = model(x)
        first.mul_(3)
        return second.pow(2).sum()  # type: ignore[no-any-return]

    pm, model = _partition("unsqueezed"), Returns(RESULTS["unsqueezed"])
    compiled = torch.compile(pm, backend="eager")
    assert torch.allclose(step(compiled, example()), step(model, example()))
    compiled, model = torch.compile(_partition("overlapping"), backend="eager"), Returns(RESULTS["overlapping"])
    assert torch.allclose(step(compiled, example()), step(model, example()))
