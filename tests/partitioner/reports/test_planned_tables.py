"""Tables of models of many operations come from the plan: they lower nothing, and say what the programs say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from partitioner import PartitionedModel, partition
from partitioner.reports import sources
from partitioner.reports.communication.planned import planned_communication, sent_by_place
from partitioner.reports.tables.devices import _sent_by_programs
from passes.ir.mesh import ranks_at_places
from passes.ir.phase import observing_phases
from tests.support.models.attention.gpt import Gpt


@pytest.fixture
def every_model_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MANY_NODES", 0)


def gpt(mode: str | Mapping[str, int], devices: int, **options: Any) -> PartitionedModel:
    tokens = torch.zeros(16, 16, dtype=torch.long)
    return partition(Gpt(depth=2), devices, mode, example_inputs=(tokens,), cluster="h100:64x8", progress=False, **options)


@pytest.mark.parametrize(
    ("mode", "devices", "options"),
    [
        pytest.param({"pipeline": 2, "data": 2, "tensor": 2}, 8, {"n_microbatches": 4}, marks=pytest.mark.slow),
        ({"pipeline": 2, "zero1": 2, "tensor": 2}, 8, {"n_microbatches": 4}),
        ({"fsdp": 2, "tensor": 2}, 4, {"recompute": "full"}),
        pytest.param({"pipeline": 2, "zero2": 2, "tensor": 2}, 8, {"n_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 4, "tensor": 2}, 8, {}, marks=pytest.mark.slow),
    ],
)
def test_planned_bytes_are_those_of_the_programs(mode: Mapping[str, int], devices: int, options: dict[str, Any]) -> None:
    """But for the loss, and for what is padded where small parameters share a message."""
    pm = gpt(mode, devices, **options)
    explained = pm.explained()
    of_programs = _sent_by_programs(explained)
    planned = sent_by_place(pm.plan, planned_communication(explained))
    for sent, ranks in zip(planned, ranks_at_places(explained.mesh), strict=True):
        for kind, size in of_programs[ranks[0]].items():
            assert sent.get(kind, 0) == pytest.approx(size, rel=0.05), (kind, ranks)


def test_a_table_and_an_explanation_lower_nothing(every_model_is_long: None) -> None:
    """Of 512 ranks, a row for each class of equal ones, and the sums of the table are those of the explanation."""
    pm, phases = gpt({"pipeline": 2, "data": 64, "tensor": 4}, 512, n_microbatches=2), list[str]()
    with observing_phases(lambda phase, _state, _seconds: phases.append(phase)):
        table, text = pm.device_table(), pm.explain()
    assert phases == []
    assert [row[0] for row in table.rows[1:-1]] == ["0-255", "256-511"]
    assert "all is predicted" in table.text()
    assert "\nACTIVATIONS\n" not in text
    summed = next(line for line in text.splitlines() if line.strip().startswith("result of") and "all-reduce" in line)
    assert summed.split("over tensor")[1].strip().startswith("128 groups of 4 ranks")
    heading = table.rows[0]
    for kind in ("all_reduce", "send"):
        assert kind in heading


def test_a_pipeline_of_a_long_model(every_model_is_long: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pm, phases = gpt("pipeline", 2, n_microbatches=4), list[str]()
    with observing_phases(lambda phase, _state, _seconds: phases.append(phase)):
        planned, text = pm.device_table(), pm.explain()
    assert phases == []
    assert "are of a whole step, predicted; x -> y" in text
    monkeypatch.setattr(sources, "MANY_NODES", 10**9)
    of_programs = pm.device_table().rows
    for name in planned.rows[0]:  # sums of gradients of tied parameters are no columns of plans without sharded axes
        cells, expected = ([row[rows[0].index(name)] for row in rows] for rows in (planned.rows, of_programs))
        assert cells == expected


@pytest.mark.slow
def test_a_page_of_a_long_model_has_no_programs(every_model_is_long: None, tmp_path: Path) -> None:
    pm = gpt({"pipeline": 2, "zero1": 16, "tensor": 4}, 128, n_microbatches=2)
    pm.save_report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "pm.graph(rank) has the program of a rank" in text
    assert "pm.cost_formula() has the formulas" in text
    assert 'class="program"' not in text
    assert text.count('<span class="bar">') == 2
    assert pm.device_table().html() in text
    assert len(text) < 1_000_000
