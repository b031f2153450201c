"""Containers and objects by which a model chooses its parts: a call after another choice is refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, partition
from tests.support.running.slow_values import all_but

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@dataclass
class Choice:
    """Numbers of the layers that are left out, beside a name."""

    first: int
    name: str = "choice"


class Plain:
    """An object without comparison."""

    def __init__(self, first: int) -> None:
        self.first = first


class Skips(nn.Module):
    """Leaves out the layers that ``skipped`` has."""

    def __init__(self, skipped: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.skipped = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), skipped

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.skipped if isinstance(self.skipped, list | tuple | set | dict) else (self.skipped.first,)
        for number, layer in enumerate(self.layers):
            x = x if number in skipped else layer(x)
        return x


def partitioned(model: nn.Module) -> PartitionedModel:
    return partition(model, 2, "pipeline", example_inputs=(X,), progress=False)


def replaced(value: Any) -> Callable[[Skips], object]:
    return lambda model: setattr(model, "skipped", value)


CHANGES: dict[str, tuple[Any, Callable[[Skips], object], str]] = {
    "list": ([1], replaced([2]), r"skipped of the model was \[1\] when the model was traced and is \[2\] now"),
    "tuple": ((1,), replaced((2,)), r"skipped of the model was \(1,\) .* is \(2,\) now"),
    "set": ({1}, replaced({2}), r"skipped of the model was \{1\} .* is \{2\} now"),
    "dict": ({1: True}, replaced({2: True}), r"skipped of the model was \{1: True\} .* is \{2: True\} now"),
    "empty list": ([], replaced([0]), r"skipped of the model was \[\] .* is \[0\] now"),
    "dataclass": (Choice(1), replaced(Choice(2)), r"skipped of the model was Choice\(first=1\) .* is Choice\(first=2\) now"),
    "object": (Plain(1), replaced(Plain(2)), r"skipped of the model was Plain\(first=1\) .* is Plain\(first=2\) now"),
    "list grows": ([], lambda model: model.skipped.append(0), r"the content of skipped was \(\) .* is \(0,\) now"),
    "list shrinks": ([1, 2], lambda model: model.skipped.clear(), r"the content of skipped was \(1, 2\) .* is \(\) now"),
    "dict grows": ({1: True}, lambda model: model.skipped.update({0: True}), r"the content of skipped was \(\(1, True\),\) .* now"),
    "set grows": ({1}, lambda model: model.skipped.add(0), r"the content of skipped was frozenset\(\{1\}\) .* now"),
}
"""Name -> what a model reads, how a loop changes it, and what the error says."""


@pytest.mark.parametrize("name", all_but(("list", "set grows"), CHANGES))
def test_another_choice_is_refused(name: str) -> None:
    choice, change, message = CHANGES[name]
    model = Skips(choice)
    pm = partitioned(model)
    torch.testing.assert_close(pm(X), model(X))
    change(model)
    with pytest.raises(ConfigError, match=message):
        pm(X)
    torch.testing.assert_close(partitioned(model)(X), model(X))


@pytest.mark.parametrize("make", all_but((list,), (list, set, tuple, Plain)))
def test_an_equal_choice_is_none(make: Callable[[Any], Any]) -> None:
    """A loop may set what it has set before; what is changed inside of that is refused, too."""
    value = 1 if make is Plain else [1]
    model = Skips(make(value))
    pm = partitioned(model)
    model.skipped = make(value)
    for _ in range(2):
        torch.testing.assert_close(pm(X), model(X))
    if make is Plain:
        model.skipped.first = 2
    elif make is not tuple:
        model.skipped.clear()
    if make is not tuple:
        with pytest.raises(ConfigError, match="skipped of the model"):
            pm(X)


@pytest.mark.slow
def test_a_choice_of_which_nothing_follows_may_change() -> None:
    """Layers that the model does not have."""
    model = Skips([7])
    pm = partitioned(model)
    for number in (8, 9):
        model.skipped = [number]
        torch.testing.assert_close(pm(X), model(X))
    model.skipped[0] = 1
    with pytest.raises(ConfigError, match=r"skipped of the model was \[9\] .* is \[1\] now"):
        pm(X)


@pytest.mark.slow
def test_tensors_in_a_container_are_no_choice() -> None:
    """Such as losses that a loop collects on the model."""

    class Collects(Skips):
        losses: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.0 * len(self.losses)

    model = Collects(Plain(5))
    model.losses = []
    pm = partitioned(model)
    for loss in (torch.zeros(2), torch.ones(2)):
        model.losses = [loss]
        torch.testing.assert_close(pm(X), model(X))
