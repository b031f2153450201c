"""Modules that repeat are traced once, and the graph is, node for node, that of a trace of all of them."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from tests.support.models.attention.gpt import Gpt
from tests.support.models.zoo import case_named
from tests.support.running.slow_values import all_but, slow

WIDTH, LENGTH = 8, 5


class Block(nn.Module):
    """Something to repeat."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, block: Callable[[int], nn.Module], depth: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(index) for index in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Masked(nn.Module):
    """Takes a mask, and gives its result and the mask in a tuple; sizes follow from the batch."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        rows = self.inner(x.reshape(batch * length, width))
        scores = (rows @ rows.transpose(0, 1)).view(batch, length, batch, length)
        return rows.view(batch, length, width) * mask + scores.sum((2, 3)).unsqueeze(-1), mask


class MaskedStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.first(x), x.new_ones(x.shape[1], 1)
        for block in self.blocks:
            x, mask = block(x, mask=mask)
        return x


class Scaled(Block):
    """The index decides a number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class Alternating(Block):
    """The index decides what is computed, for every second block."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.is_local = index % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1) if self.is_local else x)


class Threshold(Block):
    """The index decides something about batches that are not traced."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.most = 1000 + index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] < self.most else x


class Indexed(Block):
    """The index says where a cache is written, if there is one."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.name = index, f"blocks.{index}"

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        if cache is not None:
            cache[self.index] = x
        return super().forward(x)


class Asked(Indexed):
    """Asks whether there is an index, and takes no other."""

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        return super().forward(x, cache) * getattr(self, "index", 7)


class LargeBatches(Indexed):
    """The index decides something about a batch that is traced, and not about that of the example."""

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        return super().forward(x, cache) / (self.index + 1 if x.shape[0] > LENGTH else 1)


class NamesOfBlocks(Stack):
    """The model reads what its blocks do not."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (2 if block.name == "blocks.3" else 1)
        return x


class Mapped(Stack):
    """A mask is made by functions of single elements, before or between blocks."""

    def __init__(self, behind: int) -> None:
        super().__init__(Indexed)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        rows, places = (torch.arange(size, device=x.device) for size in x.shape[:2])
        mask = x.new_ones(())
        for block in self.blocks:
            if block is self.blocks[self.behind]:
                pairs = torch.vmap(torch.vmap(lambda row, place: row >= place, (None, 0)), (0, None))
                mask = pairs(rows, places).unsqueeze(-1)
            x = block(x * mask)
        return x


class Counting(Block):
    """A number that no block has decides: each third is another."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        number = Counting.calls
        Counting.calls += 1
        return super().forward(x) * (2.0 if number % 3 == 2 else 1.0)


class CountingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        Counting.calls = 0
        return super().forward(x)


class Balanced(Block):
    """Leaves something for the model to find."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.penalty = result.square().mean()
        return result


class BalancedStack(Stack):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        penalties: list[Any] = [block.penalty for block in self.blocks]
        return x, sum(penalties)


FOUND: list[Tensor] = []


class Telling(Block):
    """Puts something where the model finds it."""

    def forward(self, x: Tensor) -> Tensor:
        FOUND.append(x.mean())
        return super().forward(x)


class TellingStack(Stack):
    def forward(self, x: Tensor) -> Any:
        FOUND.clear()
        x = super().forward(x)
        total = torch.stack(FOUND).sum()
        FOUND.clear()
        return x, total


class CallsTold(Block):
    """Counts for the model."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CallsTold.calls += 1
        return super().forward(x)


class CallsToldStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        CallsTold.calls = 0
        return super().forward(x) * CallsTold.calls


class InPlace(Block):
    """Writes in what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x))


class InPlaceInside(Block):
    """Writes in what it has computed, and in views of that."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden[:, 0].mul_(2)
        hidden += x.mean()
        hidden.view(-1).clamp_(min=0)
        return x + self.down(self.dropout(hidden))


class Halved:
    """Computes something, and holds nothing."""

    def __call__(self, x: Tensor) -> Tensor:
        return x / 2


class Divided(Halved):
    """Holds what it computes with."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, x: Tensor) -> Tensor:
        return x / (self.index + 1)


class Processed(Block):
    """An object of its own computes a part."""

    def __init__(self, process: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.process = process

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.process(x))


class Called(Stack):
    """Blocks are called from several lines and modules."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.more = Stack(Block, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.more(super().forward(x))
        return self.blocks[1](self.more(x)) if x.ndim == 1 else x


class Tied(Stack):
    """Two blocks have one weight."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.blocks[3].up.weight = self.blocks[1].up.weight  # type: ignore[union-attr]


class Twice(Stack):
    """A block is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](super().forward(x))


class Between(Stack):
    """The model looks into its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + block.up.bias[:WIDTH]  # type: ignore[union-attr,index]
        return x


class Constant(Block):
    """A tensor of the code."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(2.0)


class Quiet(Block):
    """A part without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return super().forward(x) / scale


MODELS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    # name: (model, blocks that are written as others are)
    "plain": (lambda: Stack(Block), 4),
    "gpt": (lambda: Gpt(depth=5), 4),
    "sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4))), 3),
    "masked": (lambda: MaskedStack(Masked), 4),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 4), 2),
    "in_place_inside": (lambda: Stack(InPlaceInside), 4),
    "stateless": (lambda: Stack(lambda _: Processed(Halved())), 4),
    "stateful": (lambda: Stack(lambda index: Processed(Divided(index))), 0),
    "called": (Called, 6),
    "alternating": (lambda: Stack(Alternating, 7), 5),
    "between": (lambda: Between(Block), 3),
    "tied": (Tied, 2),
    "twice": (lambda: Twice(Block), 3),
    "scaled": (lambda: Stack(Scaled), 0),
    "beside_scaled": (lambda: nn.Sequential(Stack(Scaled), Stack(Block)), 4),  # what tells the former apart is read, the others are copies
    "threshold": (lambda: Stack(Threshold), 0),
    "indexed": (lambda: Stack(Indexed), 4),
    "asked": (lambda: Stack(Asked), 0),
    "large_batches": (lambda: Stack(LargeBatches), 4),
    "names_of_blocks": (lambda: NamesOfBlocks(Indexed), 0),
    "mapped": (lambda: Mapped(behind=0), 3),  # after the product with the mask, the first block has other strides
    "mapped_between": (lambda: Mapped(behind=2), 0),
    "counting": (lambda: CountingStack(Counting, 9), 0),
    "balanced": (lambda: BalancedStack(Balanced), 0),
    "telling": (lambda: TellingStack(Telling), 0),
    "calls_told": (lambda: CallsToldStack(CallsTold), 0),
}


def example_of(name: str) -> tuple[Any, ...]:
    if name == "gpt":
        return (torch.zeros(4, 6, dtype=torch.int64),)
    return (torch.zeros(4, 4 if name == "large_batches" else LENGTH, WIDTH),)  # where a length is the batch, another batch is traced


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
    assert allocations(one.graph).lies_in == allocations(other.graph).lies_in
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
