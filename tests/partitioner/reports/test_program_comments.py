"""Comments of a program: places in the model, layouts of communicated values, and reasons."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Mapping
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn

from partitioner import Constraints, PartitionedModel, partition
from partitioner.reports.communication.purpose import items_of
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.primitives import COLLECTIVES, all_reduce, receive, send
from passes.ir.mesh import Mesh
from tests.support.models.attention.gpt import Gpt


class Perceptron(nn.Module):
    """Two layers that a mesh cuts by the width between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.up(x))
        return x + self.down(wide)


def line_of(text: str) -> str:
    """Return the place of a line of the model above: ``test_program_comments.py:31``."""
    lines, first = inspect.getsourcelines(Perceptron)
    return f"test_program_comments.py:{first + next(index for index, line in enumerate(lines) if text in line)}"


def comments(pm: PartitionedModel, rank: int, function: object) -> list[str]:
    return [node.meta["comment"] for node in pm.graph(rank).graph.nodes if node.target is function]


MADE: dict[str, PartitionedModel] = {}


def cut(mode: str | Mapping[str, int], devices: int) -> PartitionedModel:
    """Return two blocks, cut; made once for all tests, which only read."""
    key = f"{mode} {devices}"
    if key not in MADE:
        tokens = torch.zeros(8, 6, dtype=torch.long)
        MADE[key] = partition(Gpt(width=16, heads=4, depth=2), devices=devices, mode=mode, example_inputs=(tokens,), progress=False)
    return MADE[key]


def test_a_sum_over_ranks_says_what_it_sums() -> None:
    pm = partition(Perceptron(), devices=2, mode="tensor", example_inputs=(torch.zeros(4, 8),), progress=False)
    reduced = comments(pm, 0, COLLECTIVES[0])
    assert reduced == [f"linear_1 [batch, ffn] partial over tensor -> [batch, ffn]; down, {line_of('self.down(wide)')}"]
    code = pm.graph(0).print_readable(print_output=False)
    assert f"        # {reduced[0]}\n        start_all_reduce_mb0 = all_reduce(" in code
    assert f"        # up, {line_of('self.up(x)')}\n" in code
    assert code.count(line_of("x + self.down")) == 3  # the heading of the layer, the sum's comment, the heading of the addition


def test_a_message_says_who_computes_and_who_reads() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    pm = partition(model, devices=2, mode="pipeline", example_inputs=(torch.zeros(4, 8),), n_microbatches=2, progress=False)
    (value,) = {node.meta["message"].value for node in pm.graph(0).graph.nodes if node.target is send}
    writer, reader = (pm.plan.stages[stage].modules[-stage - 1] for stage in (0, 1))
    sent, received = comments(pm, 0, send), comments(pm, 0, receive)
    assert len(set(sent)) == 1
    assert re.fullmatch(rf"{value} \[batch, .*\]: {writer} -> {reader}, activation.py:\d+", sent[0])
    assert re.fullmatch(rf"gradient of {value} \[batch, .*\]: {writer} <- {reader}, activation.py:\d+", received[0])
    assert "the loss: all ranks return it" in received
    assert comments(pm, 1, receive) == sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "devices"), [("tensor", 2), ("fsdp", 2), ("sequence", 2), ({"data": 2, "pipeline": 2}, 4), ({"fsdp": 2, "tensor": 2}, 4)]
)
def test_every_communication_says_how_its_value_lies(mode: str | Mapping[str, int], devices: int) -> None:
    """The layouts are printed by name; here they are read back, and compared with the shapes of the tensors that travel."""
    pm = cut(mode, devices)
    explained = pm.explained()
    whole = {node.name: node.meta.get("val") for node in explained.cut.graph.graph.nodes}
    mesh, batch = Mesh(pm.plan.mesh), explained.graph.batch
    names = {original: placeholder for placeholder, original in explained.graph.parameters.items()}
    n_compared = 0
    for graph in pm.graphs:
        for node in graph.graph.nodes:
            if node.target in (send, receive, *COLLECTIVES):
                assert node.meta["comment"]
                assert node.meta["bytes"] > 0
                found = re.match(r"(?:gradient of )?(\S+) (\[.*?\])(?: partial over [a-z ]+)? -> (\[.*?\])", node.meta["comment"])
                items = items_of(node) if node.target in COLLECTIVES else []
                if found is None or not items:
                    continue
                value = whole[names.get(found[1], found[1])]
                for text, part in ((found[2], node.args[0][0]), (found[3], items[0])):
                    assert numbers(part.meta["val"], batch, explained.graph.batch_size // rows(mesh)) * parts(text, mesh) == numbers(
                        value, batch, explained.graph.batch_size
                    ), f"{node}: {node.meta['comment']}"
                n_compared += 1
    assert n_compared or mode == {"data": 2, "pipeline": 2}


def numbers(value: Tensor, batch: Any, rows_here: int) -> int:
    """Return the number of elements of a traced tensor."""
    sizes = [int(sympy.sympify(size_of(size)).subs({batch: rows_here})) for size in value.shape]
    return math.prod(sizes)


def rows(mesh: Mesh) -> int:
    return math.prod(mesh.length(name) for name in ("data", "fsdp"))


def parts(layout: str, mesh: Mesh) -> int:
    """Return the number of parts of a printed layout."""
    return math.prod(mesh.length(name) for name in re.findall(r"/([a-z]+)", layout))


def test_borders_say_whose_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))
    exchanged = Constraints(halo="exchange")
    pm = partition(model, devices=2, mode="tile", example_inputs=(torch.zeros(1, 2, 16, 16),), constraints=exchanged, progress=False)
    (over,) = pm.plan.mesh
    layout = f"[batch, channels, height/{over[0]}, width]"
    told = [node.meta["comment"] for node in pm.graph(0).graph.nodes if "comment" in node.meta]
    assert any(text.startswith(f"tanh {layout} -> with borders; 1, ") for text in told), told
    assert any(text.startswith(f"gradient of tanh {layout} -> without borders; 1, ") for text in told), told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_comments_are_saved_with_a_program() -> None:
    graph = cut("tensor", 2).graph(0)
    restored: fx.GraphModule = pickle.loads(pickle.dumps(graph))  # noqa: S301  our own bytes
    assert restored.print_readable(print_output=False) == graph.print_readable(print_output=False)


@pytest.mark.slow
def test_the_explanation_tells_how_activations_lie() -> None:
    section = cut("tensor", 2).explain().partition("\nACTIVATIONS\n")[2].partition("\n\n")[0].splitlines()
    assert section[0].split() == ["value", "layout", "becomes"]
    told = [re.split(r"\s{2,}", line.strip()) for line in section[1:]]
    assert ["linear_1 and 3 more", "[batch, sequence, hidden] partial over tensor", "[batch, sequence, hidden]"] in told
    assert all(len(cells) == 3 for cells in told)


class Diamonds(Perceptron):
    """After a sum over ranks, forty values that are each read twice and put together again: 2 to the 40 ways to the gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for _ in range(40):
            x = x.sin() + x.cos()
        return x


@pytest.mark.slow
def test_what_a_message_is_for_is_looked_for_at_each_node_once() -> None:
    pm = partition(Diamonds(), devices=2, mode="tensor", example_inputs=(torch.rand(4, 8),), progress=False)
    pm.train_step(torch.rand(4, 8), target=torch.rand(4, 8), loss_fn=nn.functional.mse_loss)
    sums = [comment for comment in comments(pm, 0, all_reduce) if comment]
    assert len(sums) == len(set(sums)) > 0
