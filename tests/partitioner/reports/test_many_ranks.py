"""Tables of many ranks have a row for each class of equal ones, with what is simulated that they send."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partitioner import PartitionedModel, partition
from partitioner.reports.tables.mesh_devices import mesh_table


def planned(mesh: dict[str, int], devices: int) -> PartitionedModel:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    return partition(model, devices, mesh, example_inputs=(torch.randn(32, 64),), cluster="h100:4x8", progress=False)


@pytest.mark.parametrize(
    ("mesh", "classes"),
    [({"data": 16, "tensor": 2}, ["0 to 31"]), ({"pipeline": 2, "zero1": 8, "tensor": 2}, ["0 to 15", "16 to 31"])],
)
def test_equal_ranks_share_a_row(mesh: dict[str, int], classes: list[str]) -> None:
    pm = planned(mesh, 32)
    rows = pm.device_table().rows
    assert [row[0] for row in rows[1:-1]] == classes
    by_programs = mesh_table(pm.explained())  # reads the programs of all ranks
    assert sorted(by_programs.rows[0]) == sorted(rows[0])
    kinds = rows[0][9:]
    columns = {kind: [row[by_programs.rows[0].index(kind)] for row in by_programs.rows[1:]] for kind in kinds}
    for place, kind in enumerate(kinds, start=9):
        assert [row[place] for row in rows[1:]] == columns[kind]
    assert len(repr(pm).splitlines()) < 20


def test_few_ranks_have_a_row_each() -> None:
    rows = planned({"data": 2, "tensor": 2}, 4).device_table().rows
    assert [row[0] for row in rows[1:-1]] == ["0", "1", "2", "3"]
