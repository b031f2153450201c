"""The report of one partition: a single file, well formed, whose numbers are those of the model."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from cost_models.hardware.units import format_bytes, format_seconds
from partitioner import ConfigError, PartitionedModel, partition
from partitioner.reports.communication.summary import transfers
from tests.support.models.attention.gpt import Gpt

VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Reads a page: its tags, balanced, and its words by section.

    Attributes:
        attributes: of all tags.
        words: section -> its text.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: dict[str, list[str]] = {"": []}
        self.section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
            self.words[self.section] = []
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.get_starttag_text() and tag in VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        self.words[self.section].append(data)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]


@pytest.fixture(scope="module")
def model() -> PartitionedModel:
    tokens = torch.zeros(8, 6, dtype=torch.long)
    return partition(
        Gpt(width=16, heads=4, depth=2), devices=4, mode={"pipeline": 2, "tensor": 2}, example_inputs=(tokens,), progress=False
    )


@pytest.fixture(scope="module")
def text(model: PartitionedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    model.save_report(path)
    return path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_is_whole_and_alone(text: str) -> None:
    page = Page(text)
    assert page.open == []
    assert text.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in text
    fetched = [value for _, name, value in page.attributes if name in ("src", "href") and not value.startswith("#")]
    assert fetched == []
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
    assert not re.search(r"@import|url\(", text)
    targets = {value.removeprefix("#") for tag, name, value in page.attributes if (tag, name) == ("a", "href")}
    assert targets == set(page.words) - {""}
    assert targets >= {"plan", "devices", "drawing", "weights", "timeline", "memory", "communication", "formulas", "programs"}


@pytest.mark.slow
def test_the_numbers_are_the_models(model: PartitionedModel, text: str) -> None:
    page, simulation, explained = Page(text), model.simulate(), model.explained()
    top = "".join(page.words[""])
    for told in (
        format_seconds(simulation.step_time),
        f"{simulation.bubble_fraction:.0%}".replace("%", " %"),
        format_bytes(max(simulation.peak_memory)),
    ):
        assert told in top
    communication = "".join(page.words["communication"])
    moved = sum(transfer.bytes for transfer in transfers(explained.lowered, explained.classes, explained.mesh))
    assert format_bytes(moved) in communication
    for (source, destination), size in simulation.communication.items():
        assert f"rank {source} to rank {destination}: {format_bytes(size)}" in text
    memory = "".join(page.words["memory"])
    assert all(format_bytes(peak) in memory for peak in simulation.peak_memory)
    assert "[3*heads/tensor*head, hidden]" in "".join(page.words["plan"])


@pytest.mark.slow
def test_programs_are_there_line_by_line(model: PartitionedModel, text: str) -> None:
    programs = re.findall(r'<pre class="program">(.*?)</pre>', text, re.DOTALL)
    assert len(programs) == 4
    for rank, program in enumerate(programs):
        lines = [" ".join("".join(Page(line).words[""]).split()) for line in re.findall(r"<b[^>]*>.*?</b>", program)]
        assert lines == [" ".join(line.split()) for line in model.graph(rank).print_readable(print_output=False).strip().splitlines()]
    assert re.search(r'<b class="communication">.*all_reduce\(', programs[0])


@pytest.mark.slow
def test_formulas_are_typeset(model: PartitionedModel, text: str) -> None:
    found = re.search(r"<td>step time \(s\)</td><td><math[^>]*>(.*?)</math>", text)
    assert found is not None
    letters = re.sub(r"<[^>]+>", "", found[1])
    symbols = map(str, model.cost_formula().step_time.free_symbols)
    assert all(part in letters for symbol in symbols for part in symbol.split("_"))  # what follows "_" is a subscript


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_told(model: PartitionedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        model.save_report(tmp_path / "nowhere" / "report.html")
