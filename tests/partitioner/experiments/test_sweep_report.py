"""Pictures and pages of sweeps: what they show are the numbers of the rows, and nothing comes from elsewhere."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

from cost_models.hardware.units import format_seconds
from partitioner import partition
from partitioner.experiments import Results, write_report
from partitioner.experiments.results.pareto import pareto_front
from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.plots import PLOTS, family
from partitioner.experiments.results.report import report_html
from partitioner.experiments.results.row import Row, failed_row
from partitioner.reports.pictures.chart import Axis, Series, chart_svg
from passes.ir.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ET.Element:
    """Parse a picture of our own."""
    return ET.fromstring(svg)  # noqa: S314  our own text


def row(devices: int, mode: str, step_time: float, peak_memory: int, n_microbatches: int = 1, model: str = "net") -> Row:
    """Return a planned placement."""
    key = f"{model} {devices} {mode} {n_microbatches} {step_time}"
    numbers = {"step_time": step_time, "bubble_fraction": 0.25, "peak_memory": peak_memory, "communication": 10}
    return Row(key, model, devices, mode, "h100:1x8", "1F1B", n_microbatches, **numbers, bound_by="<the slowest stage>")  # type: ignore[arg-type]


ROWS = (
    row(2, "data", 1.0, 1000),
    row(4, "data", 0.6, 900),
    row(4, "data", 0.5, 950),
    row(8, "data", 0.4, 800),
    row(4, "pipeline=2,data=2", 0.7, 500, 4),
    row(8, "pipeline=2,data=4", 0.3, 400, 4),
    row(8, "pipeline=4,data=2", 0.35, 300, 8),
)
FAILED = failed_row("bad", Placement("net", 64, "pipeline", "h100:1x8"), "64 stages & no room\n  remedy: use <fewer>")
RESULTS = Results((*ROWS, FAILED))


def marks(svg: str) -> list[str]:
    """Return the tooltip of each point."""
    titles = (path.find(f"{SVG}title") for path in parsed(svg).iter(f"{SVG}path"))
    return [str(title.text) for title in titles if title is not None]


# -- which rows are drawn --------------------------------------------------------------------------------------------------------------


def test_a_family_is_a_mesh_without_sizes() -> None:
    assert [family(each) for each in ROWS[-3:]] == ["pipeline x data"] * 3
    assert family(ROWS[0]) == "data"


def test_time_is_that_of_the_fastest_of_each_family() -> None:
    told = marks(PLOTS["time"](ROWS))
    assert len(told) == 5
    drawn = [re.findall(r", (\S+) on (\d+) x .*; (\S+ m?s) a step", text)[0] for text in told]
    best = [("data", "2", 1.0), ("data", "4", 0.5), ("data", "8", 0.4), ("pipeline=2,data=2", "4", 0.7), ("pipeline=2,data=4", "8", 0.3)]
    assert drawn == [(mode, devices, format_seconds(seconds)) for mode, devices, seconds in best]


def test_efficiency_is_against_the_best_on_the_fewest() -> None:
    """Linear from 0 to 1: the pixels of the points give the fractions back."""
    svg = PLOTS["efficiency"](ROWS)
    texts = {text.text: float(text.attrib["y"]) - 3.5 for text in parsed(svg).iter(f"{SVG}text") if text.text}
    bottom, top = texts["0%"], texts["100%"]
    lines = [path.attrib["d"] for path in parsed(svg).iter(f"{SVG}path") if path.attrib.get("class", "").startswith("line")]
    heights = [float(y) for _, y in re.findall(r"[ML]([\d.]+),([\d.]+)", " ".join(lines))]
    found = [(bottom - y) / (bottom - top) for y in heights]
    expected = [2.0 / (2 * 1.0), 2.0 / (4 * 0.5), 2.0 / (8 * 0.4), 2.0 / (4 * 0.7), 2.0 / (8 * 0.3)]
    assert found == pytest.approx(expected, abs=0.005)


def test_memory_is_that_where_most_microbatches_were_tried() -> None:
    told = marks(PLOTS["memory"]((*ROWS, row(16, "data", 0.2, 700))))
    assert [re.findall(r"(\d+) microbatch", text)[0] for text in told] == ["1", "4", "8"]
    assert all(" on 8 x " in text for text in told)


def test_the_front_is_what_nothing_beats() -> None:
    chance = random.Random(5)
    rows = [row(2, "data", chance.randrange(1, 12), chance.randrange(1, 12), number) for number in range(60)]
    front = pareto_front(rows, ("step_time", "peak_memory"))

    def beats(one: Row, other: Row) -> bool:
        assert one.step_time is not None
        assert other.step_time is not None
        assert one.peak_memory is not None
        assert other.peak_memory is not None
        ours, theirs = (one.step_time, one.peak_memory), (other.step_time, other.peak_memory)
        return ours != theirs and ours[0] <= theirs[0] and ours[1] <= theirs[1]

    best = {(each.step_time, each.peak_memory) for each in rows if not any(beats(other, each) for other in rows)}
    assert {(each.step_time, each.peak_memory) for each in front} == best
    assert len(front) == len(best)
    assert len(marks(PLOTS["pareto"](rows))) == len(rows)


def test_the_front_of_results_has_the_price_where_it_is_known() -> None:
    assert [each["key"] for each in RESULTS.pareto().rows()] == [ROWS[5].key, ROWS[6].key]
    assert [each["key"] for each in RESULTS.pareto(devices=4).rows()] == [ROWS[2].key, ROWS[1].key, ROWS[4].key]
    priced = tuple(replace(each, step_cost=cost) for each, cost in zip(ROWS, (0.1, 0.3, 0.3, 0.5, 0.3, 0.4, 0.4), strict=True))
    assert [each["key"] for each in Results(priced).pareto().rows()] == [ROWS[index].key for index in (5, 6, 2, 1, 4, 0)]
    assert Results((*priced, ROWS[1])).pareto().table == Results((*priced, ROWS[1])).pareto(model="net").table
    assert len(Results((*priced[:6], ROWS[6])).pareto()) == 2, "one price is missing"
    other = replace(ROWS[0], model="other", key="other")
    assert [each["model"] for each in Results((*ROWS, other)).pareto().rows()] == ["net", "net", "other"]
    assert len(Results((FAILED,)).pareto()) == 0
    assert Results(priced).best(by="step_cost")["key"] == ROWS[0].key
    with pytest.raises(ConfigError, match="rows have no 'color'"):
        RESULTS.pareto(color="red")


def test_results_draw_some_of_their_rows() -> None:
    assert len(marks(RESULTS.plot("time", devices=8))) == 2
    assert RESULTS.plot("time", model="another") == ""
    with pytest.raises(ConfigError, match="there is no plot 'beauty'"):
        RESULTS.plot("beauty")


# -- charts ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [(values, logarithmic) for values in ([3.0], [1.0, 1.0], [1e-6, 4e3], [0.7, 0.71]) for logarithmic in (False, True)],
)
def test_everything_that_is_drawn_is_inside(values: list[float], logarithmic: bool) -> None:
    axis = Axis("value", lambda value: f"{value:g}", logarithmic=logarithmic)
    svg = chart_svg("title", axis, axis, [Series("one", [(value, value, "told") for value in values], 0)])
    root = parsed(svg)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    places = [(float(text.attrib["x"]), float(text.attrib["y"])) for text in root.iter(f"{SVG}text")]
    places += [
        (float(x), float(y)) for path in root.iter(f"{SVG}path") for x, y in re.findall(r"[ML]([\d.-]+),([\d.-]+)", path.attrib["d"])
    ]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    ticks = [text.text for text in root.iter(f"{SVG}text") if "end" in text.attrib["class"] and text.text != "value"]
    assert 2 <= len(ticks) <= 12
    assert len(set(ticks)) == len(ticks)


def test_labels_of_the_x_axis_do_not_overlap() -> None:
    axis = Axis("time", lambda value: f"{value * 1e3:.2f} ms", logarithmic=True)
    root = parsed(chart_svg("title", axis, axis, [Series("one", [(value, value, "told") for value in (0.8e-3, 1.8e-3)], 0)]))
    labels = [text for text in root.iter(f"{SVG}text") if "middle" in text.attrib["class"]]
    places = [float(text.attrib["x"]) for text in labels]
    assert len(labels) > 2
    assert min(later - place for place, later in itertools.pairwise(places)) > 6.6 * len("0.80 ms")


def test_a_chart_of_nothing_is_nothing() -> None:
    assert chart_svg("title", Axis("x", str), Axis("y", str), []) == ""


# -- the page --------------------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags close, and gathers what the page holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.cells: list[dict[str, str | None]] = []
        self.headings: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [value or "" for name, value in found.items() if name in ("src", "href", "action")]
        if tag == "td":
            self.cells.append(found)
        if tag not in ("meta", "input", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_holds_every_row_and_reason(tmp_path: Path) -> None:
    write_report(RESULTS, tmp_path / "out.html", title="A <small> sweep")
    text = (tmp_path / "out.html").read_text()
    page = Page(text)
    assert page.headings == ["Best", "Pareto front", "net on h100:1x8", "Placements", "Failures"]
    assert "<h1>A &lt;small&gt; sweep</h1>" in text
    values = {cell["data-value"] for cell in page.cells}
    assert {str(each.step_time) for each in ROWS} <= values
    assert "64 stages &amp; no room" in text
    assert "remedy: use &lt;fewer&gt;" in text
    assert text.count("<svg") == len(PLOTS)


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    text = report_html(RESULTS)
    assert all(address.startswith("#") for address in Page(text).addresses)
    outside = set(re.findall(r"https?://[^\s\"'<>]+|@import|url\(", text)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    assert "prefers-color-scheme: dark" in text


def test_each_model_on_each_machine_has_its_pictures() -> None:
    results = Results((*ROWS, row(2, "data", 1.0, 1000, model="other")))
    assert report_html(results).count("<svg") == 2 * len(PLOTS)


def test_only_failures_are_a_page_too() -> None:
    text = report_html(Results((FAILED,)))
    assert Page(text).headings == ["Failures"]


def test_pages_of_equal_rows_are_equal() -> None:
    texts = {report_html(Results(tuple(order))) for order in itertools.islice(itertools.permutations(ROWS), 5)}
    assert len({re.sub(r"\s", "", text) for text in texts}) == 1


def test_rows_link_to_the_reports_of_their_plans() -> None:
    plan = partition(nn.Linear(4, 4), 2, "data", example_inputs=(torch.rand(4, 4),), progress=False).plan
    first, second = (replace(each, plan=plan.to_json(), plan_hash=plan.hash) for each in ROWS[:2])
    text = report_html(Results((first, second, *ROWS[2:])))
    assert text.count(f'<a href="#plan-{plan.hash}">data</a>') >= 2
    assert text.count(f'id="plan-{plan.hash}"') == 1  # both rows have one plan
    assert "net, data 2: " in text
    assert "devices       cpu, cpu" in text
    assert "#plan-" not in report_html(RESULTS)
