"""Pictures and differences: what they show is what is there."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models.hardware.units import format_bytes
from partitioner import ConfigError, PartitionedModel, draw, draw_weight, partition
from partitioner.reports.pictures.blocks import block_table
from partitioner.reports.pictures.diagram import Arrow, Box, Diagram, Lane
from partitioner.reports.pictures.diagram_svg import diagram_svg
from partitioner.reports.pictures.dot import dot_text
from partitioner.reports.pictures.layers import arrange
from partitioner.reports.pictures.partition_diagram import module_runs
from passes.ir.comm.primitives import send
from passes.spmd.shards import Block
from tests.support.models.attention.gpt import Gpt

MADE: dict[str, PartitionedModel] = {}


def gpt(mode: str | Mapping[str, int], devices: int) -> PartitionedModel:
    """Return two blocks, cut; made once for all tests, which only read."""
    key = f"{mode} {devices}"
    if key not in MADE:
        tokens = torch.zeros(8, 6, dtype=torch.long)
        MADE[key] = partition(Gpt(width=16, heads=4, depth=2), devices=devices, mode=mode, example_inputs=(tokens,), progress=False)
    return MADE[key]


# -- where boxes stand -----------------------------------------------------------------------------------------------------------------


@st.composite
def laned_graphs(draw_from: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a few lanes, and edges from lower to higher numbers."""
    lanes = draw_from(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    pairs = list(itertools.combinations(range(len(lanes)), 2))
    return lanes, draw_from(st.lists(st.sampled_from(pairs), unique=True, max_size=14)) if pairs else []


@pytest.mark.slow
@given(laned_graphs())
def test_rows_are_the_longest_ways_and_places_are_taken_once(graph: tuple[list[int], list[tuple[int, int]]]) -> None:
    lanes, edges = graph
    layers = arrange(lanes, edges)

    def longest(node: int) -> int:
        return max((longest(source) + 1 for source, target in edges if target == node), default=0)

    assert list(layers.row) == [longest(node) for node in range(len(lanes))]
    taken = [(lanes[node], layers.row[node], layers.place[node]) for node in range(len(lanes))]
    for (source, target), bends in zip(edges, layers.bends, strict=True):
        if lanes[source] == lanes[target]:
            assert len(bends) == layers.row[target] - layers.row[source] - 1
            taken += [(lanes[source], layers.row[source] + 1 + step, place) for step, place in enumerate(bends)]
    assert len(set(taken)) == len(taken)
    assert all(-0.5 <= place <= layers.width[lane] - 0.5 for lane, _, place in taken)


def test_an_order_without_crossings_is_found() -> None:
    """Two chains whose ends are listed the other way round."""
    layers = arrange([0] * 4, [(0, 3), (1, 2)])
    assert (layers.place[0] < layers.place[1]) == (layers.place[3] < layers.place[2])


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        arrange([0, 0], [(0, 1), (1, 0)])


# -- the drawing of a model ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipeline_is_drawn_with_its_messages() -> None:
    pm = gpt("pipeline", 2)
    diagram = draw(pm).diagram
    lowered = pm.explained().lowered
    operations = [node.name for run in module_runs(lowered, 2) for node in run.operations]
    nodes = [node for stage in lowered.stages for node in stage.module.graph.nodes if node.op == "call_function"]
    assert set(operations) == {node.name for node in nodes if isinstance(node.meta["val"], torch.Tensor | tuple | list)}
    assert {(box.lane, box.stage) for box in diagram.boxes if box.stage is not None} == {(0, 0), (1, 1)}
    sent = {"activation": 0, "gradient": 0}
    for graph in pm.graphs:
        for node in graph.graph.nodes:
            if node.target is send and node.meta["message"].kind in sent:
                sent[node.meta["message"].kind] += node.meta["bytes"]
    (message,) = (arrow for arrow in diagram.arrows if arrow.kind == "message")
    assert message.label == f"\u2193 {format_bytes(sent['activation'])}  \u2191 {format_bytes(sent['gradient'])}"
    lanes = {box.key: box.lane for box in diagram.boxes}
    assert (lanes[message.source], lanes[message.target]) == (0, 1)
    assert all(lanes[arrow.source] == lanes[arrow.target] for arrow in diagram.arrows if arrow.kind == "data")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "devices"), [("tensor", 2), ({"data": 2, "pipeline": 2}, 4), ("fsdp", 2)])
def test_pictures_are_whole(mode: str | Mapping[str, int], devices: int) -> None:
    pm = gpt(mode, devices)
    drawing = draw(pm)
    keys = {box.key for box in drawing.diagram.boxes}
    assert len(keys) == len(drawing.diagram.boxes)
    assert any(arrow.kind == "collective" for arrow in drawing.diagram.arrows)
    svg = ET.fromstring(drawing.svg())  # noqa: S314  our own text
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert [f"rank {rank}" for rank in range(devices)] == [text for text in texts if text and re.fullmatch(r"rank \d", text)]
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    boxes = [element.attrib for element in svg.iter("{http://www.w3.org/2000/svg}rect") if "x" in element.attrib]
    for box in boxes:
        assert 0 <= float(box["x"]) <= float(box["x"]) + float(box["width"]) <= width
        assert 0 <= float(box["y"]) <= float(box["y"]) + float(box["height"]) <= height
    dot = drawing.dot()
    assert dot.count("subgraph cluster_") == devices
    assert dot.count(" -> ") == len(drawing.diagram.arrows)
    assert dot.count("{") == dot.count("}")


@pytest.mark.slow
def test_what_is_drawn_can_be_chosen(tmp_path: Path) -> None:
    pm = gpt({"data": 2, "pipeline": 2}, 4)
    shallow = draw(pm, depth=1, ranks=(1, 3)).diagram
    assert [lane.label for lane in shallow.lanes] == ["rank 1", "rank 3"]
    assert "2 of 4 ranks" in shallow.title
    assert {box.label for box in shallow.boxes} >= {"blocks", "head", "norm"}
    for name in ("model.svg", "model.dot"):
        draw(pm).save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    for call, words in (
        (lambda: draw(pm).save(tmp_path / "model.png"), "name the file .svg or .dot"),
        (lambda: draw(pm, ranks=(7,)), "there is no rank 7"),
        (lambda: draw(pm, depth=0), "depth must be 1 or more"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_names_are_escaped() -> None:
    boxes = (Box("a", 0, 0, 'say "<b>"', "", ""), Box("b", 0, 0, "b\\n", "", ""))
    diagram = Diagram("a & b", (Lane("rank 0", ""),), boxes, (Arrow("a", "b", "data"),))
    ET.fromstring(diagram_svg(diagram))  # noqa: S314  our own text
    assert 'label="say \\"<b>\\""' in dot_text(diagram)
    assert 'label="b\\\\n"' in dot_text(diagram)


# -- owners of shards ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "devices"),
    [("tensor", 2), ({"fsdp": 2, "tensor": 2}, 4), ("pipeline", 2)],
)
def test_the_table_of_a_weight_is_what_ranks_hold(mode: str | Mapping[str, int], devices: int) -> None:
    """Numbers that count the elements of the whole weight, taken by every rank's block, are where the table says."""
    pm = gpt(mode, devices)
    explained = pm.explained()
    for placeholder, name in explained.graph.parameters.items():
        blocks = explained.blocks[placeholder]
        shape = next(iter(blocks.values())).shape
        count = torch.arange(math.prod(shape)).reshape(shape)
        holders: dict[int, set[int]] = {index: set() for index in range(math.prod(shape))}
        for rank, block in blocks.items():
            for index in block.take(count).flatten().tolist():
                holders[index].add(rank)
        table = draw_weight(pm, name).table
        n_columns = table.columns[-1][1]
        for (top, bottom), cells in zip(table.rows, table.owners, strict=True):
            for (left, right), ranks in zip(table.columns, cells, strict=True):
                inside = [row * n_columns + column for row in range(top, bottom) for column in range(left, right)]
                assert all(holders[index] == set(ranks) for index in inside), name
        assert table.rows[-1][1] * n_columns == count.numel()


@pytest.mark.slow
def test_a_weight_is_drawn_as_runs_of_heads() -> None:
    pm = gpt("tensor", 2)
    drawing = draw_weight(pm, "blocks.0.query_key_value.weight")
    lines = str(drawing).splitlines()
    assert lines[0] == "blocks.0.query_key_value.weight  [3*heads/tensor*head, hidden]  float32 (48, 16)"
    assert [line.split() for line in lines[3:5]] == [["0-7", "rank", "0"], ["8-15", "rank", "1"]]
    assert "rank 1 holds (24, 16), 1.50 KiB" in str(drawing)
    ET.fromstring(drawing.svg())  # noqa: S314  our own text
    assert draw_weight(pm, "head.weight").table.owners == (((0, 1),),)  # tied: the embedding's
    with pytest.raises(ConfigError, match=r"it has blocks\.0\.up\.weight"):
        draw_weight(pm, "blocks.0.up.wieght")


def test_a_long_table_says_that_it_goes_on() -> None:
    whole = (200, 2, 3)
    blocks = {rank: Block((400, 3), whole, (((0, 200),), ((rank, rank + 1),), ((0, 3),)), (200, 3)) for rank in range(2)}
    table = block_table("w", "", blocks, ())
    assert table.is_cut_off
    assert len(table.rows) == 64
    assert table.owners[:3] == (((0,),), ((1,),), ((0,),))


def test_labels_of_messages_to_one_box_do_not_cover_each_other() -> None:
    boxes = tuple(Box(f"b{index}", index, index, f"box {index}", "", "") for index in range(4))
    arrows = tuple(Arrow(f"b{index}", "b3", "message", "\u2193 1.00 MiB  \u2191 1.00 MiB") for index in range(3))
    diagram = Diagram("three messages", tuple(Lane(f"rank {rank}", "cpu") for rank in range(4)), boxes, arrows)
    svg = ET.fromstring(diagram_svg(diagram))  # noqa: S314  our own text
    labels = [element for element in svg.iter("{http://www.w3.org/2000/svg}text") if "MiB" in (element.text or "")]
    assert len(labels) == 3
    width = 5.8 * len(str(labels[0].text))

    def left(element: ET.Element) -> float:
        anchor = {"e": 1.0, "c": 0.5}.get(element.attrib["class"].split()[-1], 0.0)
        return float(element.attrib["x"]) - anchor * width

    for one, other in itertools.combinations(labels, 2):
        assert abs(float(one.attrib["y"]) - float(other.attrib["y"])) >= 10 or abs(left(one) - left(other)) >= width
