"""Modules that repeat are traced once, and the graph is, node for node, that of a trace of all of them."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from partitioner import partition
from partitioner.tracing.export import export
from partitioner.tracing.repeated.find import TRACED_ONE_BY_ONE, TRACED_TO_COMPARE, Copies, find_copies
from partitioner.tracing.repeated.replay import write_copies
from partitioner.tracing.trace import trace
from passes.graph.aliasing import aliasing, allocations
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import ModelGraph
from tests.end_to_end.families.families import FAMILIES
from tests.partitioner.tracing.repeated.repeated_models import MODELS, WIDTH, Block, Constant, InPlace, Quiet, Stack, example_of
from tests.support.models.zoo import case_named
from tests.support.running.slow_values import all_but, slow


def listed(graph: ModelGraph) -> list[Any]:
    """Return all facts of each node."""
    return [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs), *known(node)) for node in graph.graph.nodes]


def known(node: fx.Node) -> tuple[Any, ...]:
    values = [
        (leaf.dtype, *map(str, map(size_of, (*leaf.shape, *leaf.stride()))), leaf.requires_grad) if isinstance(leaf, Tensor) else str(leaf)
        for leaf in tree_leaves(node.meta.get("val"))
    ]
    return values, node.meta.get("nn_module_stack"), node.meta.get("stack_trace")


def assert_equal_graphs(one: ModelGraph, other: ModelGraph) -> None:
    for left, right in zip(listed(one), listed(other), strict=True):
        assert left == right
    assert aliasing(one.graph) == aliasing(other.graph)
    assert allocations(one.graph).allocations_of == allocations(other.graph).allocations_of
    assert (one.parameters, one.buffers, one.outputs) == (other.parameters, other.buffers, other.outputs)
    assert [note for note in one.notes if not note.startswith(TRACED_ONE_BY_ONE)] == list(other.notes)


def traced_in_full(monkeypatch: pytest.MonkeyPatch, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelGraph:
    with monkeypatch.context() as patch:
        patch.setattr(export, "find_copies", lambda *_: ())
        return trace(model, args, kwargs)


@pytest.mark.parametrize("name", all_but(["threshold"], MODELS))
def test_the_graph_is_that_of_all_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, n_written = MODELS[name]
    model, args = make(), example_of(name)
    assert sum(len(copies.others) for copies in find_copies(model, args, {}, [])) == n_written
    assert_equal_graphs(trace(model, args, {}), traced_in_full(monkeypatch, model, args, {}))


@pytest.mark.parametrize("block", [InPlace, *slow(Constant, Quiet)])
def test_what_cannot_be_written_from_one_is_traced_as_it_is(block: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = Stack(block), example_of("")
    assert_equal_graphs(trace(model, args, {}), traced_in_full(monkeypatch, model, args, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5", "gpt2", "vit", "swin"])
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = case_named(name).build()
    full = traced_in_full(monkeypatch, instance.model, instance.args, instance.kwargs)
    assert_equal_graphs(trace(instance.model, instance.args, instance.kwargs), full)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", *slow("llama", "mistral", "gemma3", "starcoder2", "opt", "bert", "t5", "vit")])
def test_blocks_of_transformers_that_know_their_index_are_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, _) = FAMILIES[name].model(), FAMILIES[name].batch(0)
    n_written: list[int] = []

    def write(program: Any, copies: tuple[Copies, ...]) -> None:
        write_copies(program, copies)
        n_written.append(len(copies[0].others))

    with monkeypatch.context() as patch:
        patch.setattr(export, "write_copies", write)
        graph = trace(model, (), inputs)
    assert n_written == [3]
    assert_equal_graphs(graph, traced_in_full(monkeypatch, model, (), inputs))


@pytest.mark.parametrize("name", ["gpt", *slow("unet")])
def test_nothing_is_traced_in_a_slower_way(name: str) -> None:
    instance = case_named(name).build()
    pm = partition(instance.model, 2, "pipeline", example_inputs=instance.args, example_kwargs=instance.kwargs, progress=False)
    assert not slower(pm.plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_no_family_of_transformers_is_traced_in_a_slower_way(name: str) -> None:
    model, (inputs, _) = FAMILIES[name].model(), FAMILIES[name].batch(0)
    assert not slower(partition(model, 2, "pipeline", example_kwargs=inputs, progress=False).plan.notes)


def slower(notes: Sequence[str]) -> list[str]:
    return [note for note in notes if note.startswith((TRACED_ONE_BY_ONE, TRACED_TO_COMPARE))]


def test_a_slower_way_is_noted() -> None:
    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if torch.ones(2, device=x.device).any() else x

    pm = partition(Stack(lambda _: Reads()), 2, "pipeline", example_inputs=example_of(""), progress=False)
    assert len(slower(pm.plan.notes)) == 1
    assert slower(pm.plan.notes)[0] in pm.plan.notes


def test_a_region_without_gradients_beside_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.mean().exp()
            return super().forward(x) * scale

    model, args = Scaled(Block), example_of("")
    graph = trace(model, args, {})
    assert not slower(graph.notes)
    assert_equal_graphs(graph, traced_in_full(monkeypatch, model, args, {}))


def test_one_of_alike_blocks_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[int] = []

    def write(program: Any, copies: tuple[Copies, ...]) -> None:
        exported.append(sum(node.target is torch.ops.aten.gelu.default for node in program.graph.nodes))
        write_copies(program, copies)

    monkeypatch.setattr(export, "write_copies", write)
    graph = trace(Stack(Block, 6), example_of(""), {})
    assert exported == [1]
    assert sum(node.target is torch.ops.aten.gelu.default for node in graph.graph.nodes) == 6


class Remembering(Stack):
    """Its first call leaves a number, and later ones the same."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.width = 0

    def forward(self, x: Tensor) -> Tensor:
        self.width = min(x.shape[-1], 100)
        return super().forward(x) * self.width


def test_what_every_call_leaves_alike_takes_no_more_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    n_exports, original = [0], torch.export.export

    def count(*args: Any, **kwargs: Any) -> Any:
        n_exports[0] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", count)
    model = Remembering()
    trace(model, example_of(""), {})
    assert (n_exports[0], model.width) == (1, 0)


class Convolving(nn.Module):
    """A block of ConvNeXt: PyTorch stores the results of its convolution with the channels last on the CPU, and not on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        return x + self.down(nn.functional.gelu(self.up(inner))).permute(0, 3, 1, 2)


class Images(nn.Module):
    """Images with the channels last, as operations see them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, WIDTH, 2, stride=2), nn.Sequential(*(Convolving() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.patches(x.permute(0, 3, 1, 2)))
        return result


@pytest.mark.parametrize("device", [*slow("cpu"), "meta"])
def test_copies_store_their_results_as_their_template_does(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = Images().to(device), (torch.zeros(2, 12, 12, 3, device=device),)
    exported: list[int] = []

    def write(program: Any, copies: tuple[Copies, ...]) -> None:
        n_traced = sum(node.target is torch.ops.aten.gelu.default for node in program.graph.nodes)
        write_copies(program, copies)
        exported.append(n_traced)

    with monkeypatch.context() as patch:
        patch.setattr(export, "write_copies", write)
        graph = trace(model, args, {})
    assert exported == [1]
    assert_equal_graphs(graph, traced_in_full(monkeypatch, model, args, {}))
