"""A forward that reads an attribute which its last call wrote is refused; one that only writes it is traced."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.ir.errors import TraceError


class _Carries(nn.Module):
    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(6, 6), does
        self.calls, self.width, self.last = 0, 1, torch.zeros(6)
        self.means = [torch.zeros(6)]
        self.history, self.counts, self.table, self.is_warm = list[Any](), {"of": {"rows": 0}}, None, False

    def forward(self, x: Tensor) -> Any:
        return self.does(self, self.layer(x))


def counts_and_reads(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x * model.calls


def averages(model: Any, x: Tensor) -> Tensor:
    model.last = model.last * 0.9 + x.detach().mean(0)
    return x + model.last


def averages_in_a_list(model: Any, x: Tensor) -> Tensor:
    model.means[0] = model.means[0] * 0.9 + x.detach().mean(0)
    return x + model.means[0]


def counts_in_a_dict(model: Any, x: Tensor) -> Tensor:
    model.counts["of"]["rows"] += 1
    return x * model.counts["of"]["rows"]


def counts_by_a_list(model: Any, x: Tensor) -> Tensor:
    model.history.append(1)
    return x * len(model.history)


def counts_into_a_tensor(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x * torch.tensor(float(model.calls))


def begins(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "started"):
        model.started = True
        return x * 5
    return x


def counts_from_nothing(model: Any, x: Tensor) -> Tensor:
    model.steps = getattr(model, "steps", 0) + 1
    return x * model.steps


def switches(model: Any, x: Tensor) -> Tensor:
    model.is_warm = not model.is_warm
    return 2 * x if model.is_warm else x


def warms_up(model: Any, x: Tensor) -> Tensor:
    if model.calls < 2:
        x = 2 * x
    model.calls += 1
    return x


def warms_up_by_a_list(model: Any, x: Tensor) -> Tensor:
    model.history.append(0.5)
    return x if len(model.history) > 3 else 2 * x


def keeps_the_first_rows(model: Any, x: Tensor) -> Tensor:
    if model.table is None:
        model.table = x.detach().mean(0)
    return x + model.table


def counts_alone(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    model.width = x.shape[1]
    model.last = x.detach()
    return x * model.width


CARRIED: dict[Callable[[Any, Tensor], Any], str] = {
    counts_and_reads: "calls",
    averages: "last",
    averages_in_a_list: "means",
    counts_in_a_dict: "counts",
    counts_by_a_list: "history",
    counts_into_a_tensor: "calls",
    begins: "started",
    counts_from_nothing: "steps",
    switches: "is_warm",
    warms_up: "calls",
    warms_up_by_a_list: "history",
    keeps_the_first_rows: "table",
}
QUICK = (counts_and_reads, averages, averages_in_a_list, counts_in_a_dict, begins, switches, keeps_the_first_rows)


@pytest.mark.parametrize(
    ("does", "name"),
    [pytest.param(*each, marks=() if each[0] in QUICK else pytest.mark.slow) for each in CARRIED.items()],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_call_leaves_for_the_next_in_an_attribute_is_refused(does: Callable[[Any, Tensor], Any], name: str) -> None:
    model = _Carries(does)
    with pytest.raises(TraceError, match=f"changes {name} in its forward") as caught:
        trace(model, (torch.ones(4, 6),))
    assert "register_buffer" in str(caught.value)
    assert (model.calls, model.history, model.counts, model.table) == (0, [], {"of": {"rows": 0}}, None)
    assert not model.last.any()


def writes_containers(model: Any, x: Tensor) -> Tensor:
    model.history.append(x.detach())
    model.counts["of"] = {"rows": x.shape[0], "calls": model.counts["of"].get("calls", 0) + 1}
    model.output = {"hidden": (x, None)}
    model.is_warm = True
    return x


def remembers_positions(model: Any, x: Tensor) -> Tensor:
    if model.table is None or model.table.shape[0] < x.shape[0]:
        model.table = torch.arange(x.shape[0], dtype=x.dtype).outer(torch.ones(6))
    return x + model.table[: x.shape[0]]


def remembers_a_size(model: Any, x: Tensor) -> Tensor:
    if x.shape[0] != getattr(model, "rows", None) or model.table is None:
        model.rows, model.table = x.shape[0], torch.arange(x.shape[0], dtype=x.dtype)[:, None]
    return x + model.table


def grows(model: Any, x: Tensor) -> Tensor:
    """Compare a number that only the first call changes."""
    model.width = max(model.width, 6)
    return x


@pytest.mark.parametrize(
    "does", [counts_alone, writes_containers, remembers_positions, remembers_a_size, grows], ids=lambda does: does.__name__
)
def test_attributes_that_are_only_written_or_hold_what_is_constant_are_allowed(does: Callable[[Any, Tensor], Any]) -> None:
    trace(_Carries(does), (torch.ones(4, 6),))


class _Replaces(nn.Module):
    """Replaces its layer by another module in the first call, as BigBird does for short inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = False
        self.layer: nn.Module = nn.ModuleDict({"inner": nn.Linear(6, 6)})

    def forward(self, x: Tensor) -> Any:
        if not self.is_ready:
            inner = self.layer.get_submodule("inner")
            self.layer, self.is_ready = nn.Sequential(), True
            self.layer.add_module("inner", inner)
        return self.layer(x)


def test_a_module_that_the_first_call_replaces_stays_replaced_in_the_next() -> None:
    trace(_Replaces(), (torch.ones(4, 6),))
