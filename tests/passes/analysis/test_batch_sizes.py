"""Two traces of a model are paired if they differ in numbers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from passes.analysis.batch_sizes import pair_nodes

aten = torch.ops.aten


def graph(size: int, *, dim: Any = 0, dtype: torch.dtype = torch.float32, turned: bool = False) -> fx.Graph:
    result = fx.Graph()
    x, y = result.placeholder("x"), result.placeholder("y")
    added = result.call_function(aten.add.Tensor, (y, x) if turned else (x, y))
    result.output(
        result.call_function(aten.sum.dim_IntList, (result.call_function(aten.view.default, (added, [size, 2])), dim), {"dtype": dtype})
    )
    return result


@pytest.mark.parametrize(
    ("other", "is_paired"),
    [({}, True), ({"dim": 1}, True), ({"dim": True}, False), ({"dtype": torch.float64}, False), ({"turned": True}, False)],
    ids=["size", "number", "flag", "dtype", "operands"],
)
def test_traces_are_paired_if_they_differ_in_numbers_alone(other: dict[str, Any], is_paired: bool) -> None:
    one, twin = graph(4), graph(6, **other)
    pairs = pair_nodes(one, twin)
    assert (pairs is not None) == is_paired
    assert pairs is None or list(pairs.values()) == list(twin.nodes)
