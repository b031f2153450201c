"""``pm.dump_passes``: what every phase gives, in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError
from passes.normalize.order import NORMALIZE
from passes.pipeline import PHASES


def perceptron(mode: str | dict[str, int], devices: int, *, training: bool = True) -> PartitionedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).train(training)
    return partition(model, devices, mode, example_inputs=(torch.randn(8, 6),), progress=False)


def code(text: str) -> list[str]:
    """Return the lines of a program that are no comments."""
    return [line.partition("  #")[0] for line in text.splitlines() if not line.strip().startswith("#")]


@pytest.mark.parametrize(
    ("mode", "devices"),
    [pytest.param("pipeline", 2, marks=pytest.mark.slow), ({"data": 2, "tensor": 2}, 4), pytest.param("model", 1, marks=pytest.mark.slow)],
)
def test_every_phase_has_a_line_and_what_changed_a_file(mode: str | dict[str, int], devices: int, tmp_path: Path) -> None:
    perceptron(mode, devices).dump_passes(tmp_path / "passes")
    lines = (tmp_path / "passes" / "phases.txt").read_text(encoding="utf-8").splitlines()[1:]
    names = [line.split()[0] for line in lines]
    assert [name.partition("_")[2] for name in names] == [*(phase.name for phase in NORMALIZE), *(phase.name for phase in PHASES)]
    for name, line in zip(names, lines, strict=True):
        found = [path for path in (tmp_path / "passes").iterdir() if path.stem == name]
        assert bool(found) is not line.endswith("no change"), name


def test_the_last_texts_are_the_programs_that_run(tmp_path: Path) -> None:
    pm = perceptron({"data": 2, "tensor": 2}, 4)
    pm.dump_passes(tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.name.endswith("_place"))
    written = {path.stem: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert set(written) == {f"rank_{rank}" for rank in range(4)}
    for rank in range(4):
        assert code(pm.graph(rank).code) == code(written[f"rank_{rank}"])


def test_an_evaluated_model_has_its_forward_written(tmp_path: Path) -> None:
    perceptron("tensor", 2, training=False).dump_passes(tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.name.endswith("_place"))
    assert "def forward(" in (folder / "rank_1.py").read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/passes cannot be written"):
        perceptron("data", 2).dump_passes(tmp_path / "file" / "passes")
