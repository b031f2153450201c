"""Reports of many ranks read one program for each class of equal ranks, and say what those of all ranks say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import PartitionedModel, partition
from partitioner.reports.communication.summary import transfers
from partitioner.reports.communication.transfer import Transfer
from partitioner.reports.explain.sharding import activations_section
from partitioner.reports.sources import Explained, RankClass
from partitioner.reports.tables.devices import device_table


def planned(mesh: dict[str, int], devices: int, rows: int = 32, **options: Any) -> PartitionedModel:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    return partition(model, devices, mesh, example_inputs=(torch.randn(rows, 64),), cluster="h100:4x8", progress=False, **options)


def with_all_programs(pm: PartitionedModel) -> Explained:
    """Return what reports read, with the program of every rank, in which every call is inlined."""
    explained = dataclasses.replace(pm.explained())
    vars(explained)["classes"] = RankClass.of_each(explained.programs)
    return explained


def communicated(explained: Explained) -> list[Transfer]:
    return sorted(transfers(explained.lowered, explained.classes, explained.mesh), key=repr)


MESHES = {
    "data 16 x tensor 2": ({"data": 16, "tensor": 2}, {}, ["0-31"]),
    "pipeline 2 x zero1 8 x tensor 2": ({"pipeline": 2, "zero1": 8, "tensor": 2}, {}, ["0-15", "16-31"]),
    "pipeline 2 x fsdp 4 x tensor 4": ({"pipeline": 2, "fsdp": 4, "tensor": 4}, {"n_microbatches": 4}, ["0-15", "16-31"]),
    "fsdp 32, recomputed": ({"fsdp": 32}, {"recompute": "full"}, ["0-31"]),
    "microbatches of 3 or 2 rows": ({"pipeline": 4, "data": 2, "tensor": 4}, {"n_microbatches": 3, "rows": 14}, None),
}


@pytest.mark.parametrize(
    "name", [name if number in (2, 4) else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(MESHES)]
)
def test_classes_say_what_all_programs_say(name: str) -> None:
    mesh, options, classes = MESHES[name]
    pm = planned(mesh, 32, **options)  # type: ignore[arg-type]
    explained, of_all = pm.explained(), with_all_programs(pm)
    assert len(explained.classes) < 32
    assert communicated(explained) == communicated(of_all)
    assert str(activations_section(explained)) == str(activations_section(of_all))
    assert device_table(explained).rows == device_table(of_all).rows
    if classes is not None:
        assert [row[0] for row in pm.device_table().rows[1:-1]] == classes
    assert len(repr(pm).splitlines()) < 20


def test_few_ranks_have_a_row_each() -> None:
    rows = planned({"data": 2, "tensor": 2}, 4).device_table().rows
    assert [row[0] for row in rows[1:-1]] == ["0", "1", "2", "3"]


def test_a_page_of_many_ranks_has_a_program_and_a_bar_a_class(tmp_path: Path) -> None:
    pm = planned({"pipeline": 2, "fsdp": 4, "tensor": 4}, 32, n_microbatches=4)
    pm.save_report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "rank 15 on cpu, and 15 ranks like it" in text
    assert "rank 31 on cpu, and 15 ranks like it" in text
    assert {"Rank15TrainStep", "Rank31TrainStep"} <= set(re.findall(r"Rank\d+TrainStep", text))
    assert text.count('<span class="bar">') == 2
    assert "Of equal calls of a stage, the first alone is inlined" in text
    assert "more ranks run programs like these" not in text
    assert text.count('<td title="rank ') == 32 * 32
    assert len(text) < 1_000_000
