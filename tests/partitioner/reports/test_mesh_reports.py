"""Reports of a model on a mesh: the numbers are those of formulas and of the tensors that ranks hold."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Mapping

import pytest
import torch
import transformers
from torch import Tensor, nn

from cost_models.hardware.units import format_bytes, format_flops
from partitioner import PartitionedModel, partition
from partitioner.reports.communication.summary import transfers
from partitioner.reports.explain.explanation import explanation
from tests.support.models.attention.gpt import Gpt

ROWS, NARROW, WIDE, CLASSES = 8, 16, 64, 4


def perceptron(mode: str | Mapping[str, int], devices: int, **arguments: object) -> PartitionedModel:
    model = nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, CLASSES))
    inputs = (torch.randn(ROWS, NARROW),)
    return partition(model, devices, mode, example_inputs=inputs, n_microbatches=1, progress=False, **arguments)  # type: ignore[arg-type]


def gpt(mode: str | Mapping[str, int], devices: int, schedule: str | None = None) -> PartitionedModel:
    tokens = torch.zeros(8, 6, dtype=torch.long)
    return partition(Gpt(depth=2), devices, mode, example_inputs=(tokens,), n_microbatches=2, schedule=schedule, progress=False)


def cells(pm: PartitionedModel) -> list[list[str]]:
    """Return the cells of the table of ranks."""
    shown = html.unescape(pm._repr_html_())
    return [re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row) for row in re.findall(r"<tr>.*?</tr>", shown)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "devices"), [({"data": 2, "pipeline": 2, "tensor": 2}, 8), ("fsdp", 2)])
def test_ranks_hold_the_parameters_that_the_table_says(mode: str | Mapping[str, int], devices: int) -> None:
    pm = gpt(mode, devices)
    heading, *rows, total = cells(pm)
    counts = []
    for rank in range(devices):
        held = [part for _, part in pm.named_parts(rank)]
        counts.append(sum(tensor.numel() for tensor in held))
        row = dict(zip(heading, rows[rank], strict=True))
        assert row["rank"] == str(rank)
        assert row["parameters"] == f"{counts[rank]:,}"
        assert row["size"] == format_bytes(sum(tensor.nbytes for tensor in held))
    assert len(rows) == devices
    assert f"{sum(counts):,}" in total


@pytest.mark.slow
def test_the_text_has_the_cells_of_the_notebook() -> None:
    pm = gpt({"data": 2, "pipeline": 2, "tensor": 2}, 8, "1F1B")
    text = str(pm).splitlines()
    assert [" ".join(line.split()) for line in text[2:-2]] == [" ".join(" ".join(row).split()) for row in cells(pm)]
    assert max(map(len, text)) <= 160
    assert [row[1] for row in cells(pm)[1:-1]] == [f"data {rank // 4}, tensor {rank % 2}" for rank in range(8)]
    assert [row[3] for row in cells(pm)[1:-1]] == [str(rank // 2 % 2) for rank in range(8)]


def test_work_is_that_of_a_ranks_own_part() -> None:
    """Two multiplications and additions for each pair of numbers that meet, of half of the wide layer, and of half of the rows."""
    whole = 2 * ROWS * WIDE * (NARROW + CLASSES)
    for mode in ("tensor", "data"):
        heading, *rows, _ = cells(perceptron(mode, 2))
        for row in rows:
            shown = row[heading.index("work forward")]
            assert float(shown.split()[0]) == pytest.approx(float(format_flops(whole / 2).split()[0]), rel=0.06)  # and what is small


def test_a_tensor_mesh_sends_the_sums_of_its_activations() -> None:
    heading, *rows, _ = cells(perceptron("tensor", 2))
    result = ROWS * CLASSES * 4
    assert [row[heading.index("all_reduce")] for row in rows] == [format_bytes(result), format_bytes(result)]  # 2 (n - 1) / n times it


def test_a_data_mesh_sends_the_gradients_of_all_parameters_and_the_loss() -> None:
    pm = perceptron("data", 4)
    heading, *rows, _ = cells(pm)
    size = 4 * (NARROW * WIDE + WIDE + WIDE * CLASSES + CLASSES + 1)
    assert [row[heading.index("all_reduce")] for row in rows] == [format_bytes(size * 2 * 3 // 4)] * 4
    inspected = pm.inspected()
    lines = {transfer.value: transfer for transfer in transfers(inspected.stages, inspected.classes(), pm.explained().mesh)}
    assert lines["loss"].reason == "all-reduce: each rank has that of its rows"
    assert (lines["loss"].bytes, lines["loss"].source, lines["loss"].destination) == (4 * 4 * 2 * 3 // 4, "over data", "ranks 0 to 3")
    assert lines["gradient of 2.bias and 3 more"].reason == "all-reduce: parameters that these ranks share"


def lines_of(text: str, section: str) -> list[list[str]]:
    body = text.partition(f"\n{section}\n")[2].partition("\n\n")[0]
    return [re.split(r"\s{2,}", line.strip()) for line in body.splitlines()]


def test_explain_tells_axes_and_layouts() -> None:
    text = perceptron({"data": 2, "tensor": 2}, 4).explain()
    assert ["batch", str(ROWS), "data", str(ROWS // 2)] in lines_of(text, "AXES")
    assert ["ffn", str(WIDE), "tensor", str(WIDE // 2)] in lines_of(text, "AXES")
    parameters = {line[0]: line[1:] for line in lines_of(text, "PARAMETERS")}
    assert parameters["0.weight"][0].startswith("[ffn/tensor, ")
    assert parameters["0.weight"][1:] == [str((WIDE, NARROW)), str((WIDE // 2, NARROW))]
    assert parameters["2.weight"][0].endswith(", ffn/tensor]")
    assert parameters["2.bias"][-2:] == [str((CLASSES,)), str((CLASSES,))]
    assert "\n  batch      8 rows in 1 microbatch\n" in text


def communication_of(text: str) -> dict[str, list[str]]:
    """Return value -> its message, bytes and number, from, to, and why, of which each may be wrapped."""
    heading, *lines = text.partition("\nCOMMUNICATION\n")[2].partition("\n\n")[0].splitlines()
    starts = [heading.index(name) for name in ("value", "one message", "from", "to", "why")]
    rows: list[list[str]] = []
    for line in lines:
        row = [line[first:last].strip() for first, last in zip(starts, [*starts[1:], None], strict=True)]
        if row[1]:
            rows.append(row)
        else:
            rows[-1] = [f"{above} {below}".strip() for above, below in zip(rows[-1], row, strict=True)]
    return {value: [*re.split(r"\s{2,}", message), *rest] for value, message, *rest in rows}


@pytest.mark.slow
def test_explain_tells_every_kind_of_communication_and_why() -> None:
    text = gpt({"data": 2, "pipeline": 2, "tensor": 2}, 8, "1F1B").explain()
    found = communication_of(text)
    assert found["result of token and 4 more"][3:] == ["over tensor", "4 groups of 2 ranks", "all-reduce: each rank has a part of the sum"]
    assert found["input gradient of blocks.1.query_key_value and 4 more"][3] == "over tensor"
    assert found["gradient of token.weight"][3:5] == ["over data and pipeline", "2 groups of 4 ranks"]
    (sent,) = [row for row in found.values() if row[3:5] == ["stage 0, ranks 0, 1, 4 and 5", "stage 1, ranks 2, 3, 6 and 7"]]
    assert sent[0] == "float32 (2, 6, 12)"  # a batch of 8 over two replicas in two microbatches
    assert sent[1] == format_bytes(2 * 8 * 6 * 12 * 4)  # the whole batch once for each tensor rank
    stages = lines_of(text, "STAGES")
    assert stages[1][1].startswith("0, 1, 4, 5")
    assert any(line.startswith("  place 1 |...|1F0|") for line in text.splitlines())


def test_explain_tells_what_fsdp_gathers_and_scatters() -> None:
    text = perceptron("fsdp", 2).explain()
    found = {tuple(line[1:2] + line[-1:]): line for line in lines_of(text, "COMMUNICATION")}
    whole = 4 * (NARROW * WIDE + WIDE + WIDE * CLASSES + CLASSES)
    gathered = found["put together", "all-gather: held in parts, needed whole"]
    assert gathered[0] == "0.weight and 3 more"
    assert gathered[2] == format_bytes(whole)  # of two ranks, each sends its half
    scattered = found["summed and cut", "reduce-scatter: each rank keeps its part"]
    assert scattered[0].startswith("gradient of ")
    assert scattered[0].endswith(" and 3 more")
    assert scattered[2] == format_bytes(whole)
    assert ["parameters", "fsdp", "a part of each, gathered where it is used"] in lines_of(text, "AXES")


@pytest.mark.slow
def test_an_axis_that_does_not_divide_is_told() -> None:
    text = gpt("tensor", 2).explain()
    assert ["heads", "3", "tensor", "2 or 1"] in lines_of(text, "AXES")
    weights = next(line for line in lines_of(text, "PARAMETERS") if line[0] == "blocks.*.query_key_value.weight")
    assert weights[1:] == ["x 2", "[3*heads/tensor*head, hidden]", "(36, 12)", "(24, 12) or (12, 12)"]


@pytest.mark.slow
def test_axes_of_grouped_attention_have_the_names_that_a_person_uses() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False,
    )  # fmt: skip
    tokens = torch.zeros(2, 6, dtype=torch.long)
    model = transformers.LlamaForCausalLM(config)
    pm = partition(model, 2, "tensor", example_kwargs={"input_ids": tokens}, progress=False)
    lines = [line for line in lines_of(pm.explain(), "PARAMETERS") if len(line) > 1]
    layouts = {line[0].removeprefix("model.layers.0."): line[1].replace("/tensor", "") for line in lines}
    assert layouts["model.embed_tokens.weight"] == "[vocab, hidden]"
    assert layouts["self_attn.v_proj.weight"] == "[heads*head, hidden]"
    assert layouts["mlp.up_proj.weight"] == "[ffn, hidden]"
    assert layouts["mlp.down_proj.weight"] == "[hidden, ffn]"
    assert layouts["input_layernorm.weight"] == "[hidden]"


@pytest.mark.slow
def test_what_bounds_a_step_is_told_by_ranks_of_the_mesh() -> None:
    explained = gpt({"data": 2, "pipeline": 2}, 4).explained()
    plan = explained.plan.predicted(bound_by="stage 1 on rank 1 is the slowest")
    assert "  bound by   stage 1 on ranks 1 and 3 is the slowest\n" in explanation(dataclasses.replace(explained, plan=plan))


def test_evaluation_has_reports() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, CLASSES)).eval()
    x: Tensor = torch.randn(ROWS, NARROW)
    pm = partition(model, 2, "data", example_inputs=(x,), progress=False)
    assert "evaluation" in str(pm).splitlines()[0]
    assert "all ranks return all rows" in pm.explain()
    assert f"# {ROWS // 2 * CLASSES * 4} B" in next(line for line in pm.graph(1).code.splitlines() if "= all_gather(" in line)
