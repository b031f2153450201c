"""Groups of an optimizer of a pipeline, of whose processes each has those of its own stages: one list, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partitioner.runtime.state.optimizers.named_groups import check_sendable, groups_of_all
from passes.ir.errors import ConfigError
from tests.support.processes.optimizer_cases import Mode, rates_in_processes
from tests.support.processes.processes import Workers

ORDER = ["in.weight", "in.bias", "mid.weight", "mid.bias", "out.weight", "out.bias"]


def group(names: str, **options: Any) -> dict[str, Any]:
    return {"params": names.split(), **options}


@pytest.mark.parametrize(
    ("of_processes", "expected"),
    [
        ([[group("in.weight in.bias", lr=1)], [group("out.weight", lr=1)]], [group("in.weight in.bias out.weight", lr=1)]),
        ([[group("in.weight", lr=1)], [group("out.weight", lr=2)]], [group("in.weight", lr=1), group("out.weight", lr=2)]),
        ([[group("", lr=1)], [group("out.weight", lr=1)]], [group("out.weight", lr=1)]),
        (
            [[group("in.weight mid.weight", wd=1), group("in.bias", wd=0)], [group("out.weight", wd=1), group("out.bias", wd=0)]],
            [group("in.weight mid.weight out.weight", wd=1), group("in.bias out.bias", wd=0)],
        ),
        (
            [[group("in.weight", lr=1), group("in.bias", lr=2)], [group("out.weight", lr=1), group("out.bias", lr=2)]],
            [group("in.weight", lr=1), group("in.bias", lr=2), group("out.weight", lr=1), group("out.bias", lr=2)],
        ),
        (
            [[group("out.weight", lr=3)], [group("mid.weight", lr=2), group("in.weight", lr=1)]],
            [group("in.weight", lr=1), group("mid.weight", lr=2), group("out.weight", lr=3)],
        ),
        (
            [[group("in.weight", lr=1)], [group("in.weight in.bias", lr=1)], [group("out.weight", lr=torch.tensor(2.0))]],
            [group("in.weight in.bias", lr=1), group("out.weight", lr=torch.tensor(2.0))],
        ),
        (
            [[group("in.weight in.bias", name="body")], [group("", name="body"), group("out.weight out.bias", name="head")]],
            [group("in.weight in.bias", name="body"), group("out.weight out.bias", name="head")],
        ),
    ],
    ids=["one", "one, rates", "a rank without", "kinds", "a group each", "other counts", "shards", "a rank lacks"],
)
def test_groups_of_all(of_processes: list[list[dict[str, Any]]], expected: list[dict[str, Any]]) -> None:
    assert groups_of_all(of_processes, ORDER) == expected


def test_unlike_options_of_one_parameter_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"in\.weight is in groups of different options"):
        groups_of_all([[group("in.weight", lr=1)], [group("in.weight", lr=2)]], ORDER)


@pytest.mark.parametrize("value", [lambda step: 0.1 * step, ConfigError("x")], ids=["function", "object"])
def test_options_that_cannot_be_sent_are_named(value: object) -> None:
    with pytest.raises(ConfigError, match="option rate of group 1 of the optimizer is"):
        check_sendable([group("in.weight", lr=1), group("in.bias", rate=value)])


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("modes", [("pipeline", "fsdp"), ("fsdp", "pipeline")], ids=str)
def test_a_rate_of_each_parameter_goes_to_another_plan(modes: tuple[Mode, Mode], workers: Callable[[int], Workers], tmp_path: Path) -> None:
    """Each rate was changed in training; sharded and full states have all of them."""
    for problems in workers(2).values(rates_in_processes, *modes, str(tmp_path), timeout=100):
        assert not problems
