"""The axes of small models written by hand: which dimensions are one loop, as einops would write them."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.analysis.axes import Axes, find_axes
from passes.analysis.axis_names import axes_named, axis_names, batch_axes, short_names
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.layout import Shard
from passes.normalize.randomness.functional_rng import split_randomness
from passes.spmd.local_shapes import Extents
from passes.spmd.shards import block_of

BATCH, LENGTH, WIDTH, HEADS = 5, 7, 12, 3


def analysed(model: nn.Module, *args: Any, batch_size: int | None = None) -> tuple[ModelGraph, Axes]:
    graph = trace(model, args, batch_size=batch_size)
    return graph, find_axes(graph.graph)


def of_parameter(graph: ModelGraph, axes: Axes, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the axes of a parameter by its name in the model."""
    return axes.of(next(placeholder for placeholder, original in graph.parameters.items() if original == name))


def of_result(graph: ModelGraph, axes: Axes, place: int = 0) -> tuple[tuple[int, ...], ...]:
    node = graph.outputs[place].node
    assert node is not None
    return axes.of(node)


def sizes_of(axes: Axes, dimension: Sequence[int]) -> list[object]:
    return [axes.sizes[axis] for axis in dimension]


class FusedAttention(nn.Module):
    """Queries, keys and values from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.fused(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GroupedQueries(nn.Module):
    """Six heads of queries share two of keys and values, which are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, 6, 4).transpose(1, 2)
        k, v = (layer(x).view(batch, length, 2, 4).transpose(1, 2) for layer in (self.key, self.value))
        k, v = (each[:, :, None].expand(batch, 2, 3, length, 4).reshape(batch, 6, length, 4) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, 24)


def test_a_fused_projection_is_three_times_heads_times_head() -> None:
    graph, axes = analysed(FusedAttention(), torch.randn(BATCH, LENGTH, WIDTH))
    rows, columns = of_parameter(graph, axes, "fused.weight")
    assert sizes_of(axes, rows) == [3, HEADS, WIDTH // HEADS]
    assert of_parameter(graph, axes, "fused.bias") == (rows,)
    assert of_parameter(graph, axes, "out.weight")[1] == rows[1:], "the heads of attention are what the last layer contracts"
    assert of_parameter(graph, axes, "out.weight")[0] == columns, "the residual sum makes them one"


def test_a_fused_projection_is_cut_by_heads_in_runs() -> None:
    """As a hand cuts it: of each of queries, keys and values the rows of the rank's heads."""
    model = FusedAttention()
    graph, axes = analysed(model, torch.randn(BATCH, LENGTH, WIDTH))
    dimensions = of_parameter(graph, axes, "fused.weight")
    heads = dimensions[0][1]
    weight = model.fused.weight.detach()
    by_hand = weight.reshape(3, HEADS, WIDTH // HEADS, WIDTH)
    for rank, kept in enumerate((slice(0, 2), slice(2, 3))):
        block = block_of(dimensions, (Shard(heads, 0),), Extents(axes.sizes, (("tensor", 2),), (rank,), graph.batch, 1))
        assert torch.equal(block.take(weight), by_hand[:, kept].reshape(-1, WIDTH))


def test_grouped_queries_share_the_axis_of_their_keys() -> None:
    graph, axes = analysed(GroupedQueries(), torch.randn(BATCH, LENGTH, WIDTH))
    (query, _), (key, _), (value, _) = (of_parameter(graph, axes, f"{name}.weight") for name in ("query", "key", "value"))
    assert sizes_of(axes, query) == [2, 3, 4]
    assert sizes_of(axes, key) == [2, 4]
    assert key[0] == value[0] == query[0], "the two groups"
    assert key[1] == query[2], "queries and keys meet inside a head"
    names = axis_names(graph, axes)
    assert names[query[0]].startswith("heads")


class SharedKeys(GroupedQueries):
    """The same, with heads that the attention repeats by itself."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def test_the_queries_of_a_head_of_keys_are_heads() -> None:
    graph, axes = analysed(SharedKeys(), torch.randn(BATCH, LENGTH, WIDTH))
    (query, _), (key, _) = (of_parameter(graph, axes, f"{name}.weight") for name in ("query", "key"))
    names = axis_names(graph, axes)
    assert [names[axis].partition("[")[0] for axis in query] == ["heads", "heads", "head"]
    assert [names[axis].partition("[")[0] for axis in key] == ["heads", "head"]
    assert key[0] == query[0]


class Merges(nn.Module):
    """Rows and columns become one dimension and part again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        merged = (x + self.weight).flatten(1)
        return merged.reshape(-1, 2, 3, 4).sum(2)


def test_a_split_reaches_the_tensors_in_front_of_it() -> None:
    """(row column) is split after the weight was read: the weight's rows are two times three all the same."""
    graph, axes = analysed(Merges(), torch.randn(BATCH, 6, 4))
    rows, columns = of_parameter(graph, axes, "weight")
    assert sizes_of(axes, rows) == [2, 3]
    assert of_result(graph, axes)[1:] == (rows[:1], columns)
    input_axes = axes.of(next(leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None))
    assert input_axes[1:] == (rows, columns)


class Incompatible(nn.Module):
    """Six, read as two rows of three and as three rows of two."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.reshape(-1, 2, 3) * 2, x.reshape(-1, 3, 2) * 3


def test_factorisations_that_do_not_refine_each_other_stay_apart() -> None:
    """Neither of 2 x 3 and 3 x 2 refines the other: cutting one must not cut the other."""
    graph, axes = analysed(Incompatible(), torch.randn(BATCH, 6))
    two, three = of_result(graph, axes, 0)[1:]
    other_three, other_two = of_result(graph, axes, 1)[1:]
    assert not ({*two, *three} & {*other_three, *other_two})
    assert math.prod(int(axes.sizes[axis]) for axis in (*two, *three)) == 6


class Mixed(nn.Module):
    """The input is read whole, by halves and by thirds of halves."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, x.reshape(-1, 2, 6) * 2, x.reshape(-1, 2, 3, 2) * 2


def test_refinements_meet() -> None:
    graph, axes = analysed(Mixed(), torch.randn(BATCH, 12))
    whole, halves, thirds = (of_result(graph, axes, place)[1:] for place in range(3))
    assert [sizes_of(axes, dimension) for dimension in thirds] == [[2], [3], [2]]
    flat = tuple(axis for dimension in thirds for axis in dimension)
    assert whole == (flat,)
    assert halves == (flat[:1], flat[1:])


class Gram(nn.Module):
    """Every row with every row."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(-1, -2)


def test_one_axis_may_occur_twice_in_a_tensor() -> None:
    """Rows times rows: one loop of the input, in two dimensions of the result, of which a cut takes one."""
    graph, axes = analysed(Gram(), torch.randn(BATCH, LENGTH, WIDTH))
    batch, rows, columns = of_result(graph, axes)
    assert rows == columns
    assert len(rows) == 1
    assert axes.sizes[rows[0]] == LENGTH
    assert rows != batch


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_channels_of_neighbouring_convolutions_are_one_axis() -> None:
    graph, axes = analysed(Convolution(), torch.randn(BATCH, 3, 6, 6))
    made, *_ = of_parameter(graph, axes, "first.weight")
    assert of_parameter(graph, axes, "second.weight")[1] == made
    assert axis_names(graph, axes)[made[0]].startswith("channels")


class Classifier(nn.Module):
    """Tokens to logits with a feed-forward layer of its own width."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(19, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.attention = FusedAttention()
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.attention(self.token(tokens))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x.mean(1)), labels)


def test_names_are_what_a_person_calls_them() -> None:
    graph, axes = analysed(Classifier(), torch.randint(19, (BATCH, LENGTH)), torch.randint(11, (BATCH,)))
    names = axis_names(graph, axes)

    def name(parameter: str, dimension: int, place: int = 0) -> str:
        return names[of_parameter(graph, axes, parameter)[dimension][place]].partition("[")[0]

    assert name("token.weight", 0) == "vocab"
    assert name("token.weight", 1) == "hidden"
    assert name("up.weight", 0) == name("down.weight", 1) == "ffn"
    assert name("attention.fused.weight", 0, 1) == "heads"
    assert name("attention.fused.weight", 0, 2) == "head"
    assert name("head.weight", 0) == "vocab", "the classes of a cross-entropy"
    tokens = next(leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None)
    assert [names[each[0]].partition("[")[0] for each in axes.of(tokens)] == ["batch", "sequence"]
    assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "opt", "encoder"])
def test_names_do_not_depend_on_training(kind: str) -> None:
    """In training, attention with dropout is decomposed: the width of a head is then contracted by a plain product of two activations."""
    tokens = torch.zeros(4, 8, dtype=torch.long)
    if kind == "gpt2":
        model: nn.Module = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=29, n_embd=24, n_layer=1, n_head=3, use_cache=False)
        )
    elif kind == "opt":
        sizes = {"hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 1, "num_attention_heads": 3, "word_embed_proj_dim": 24}
        model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=29, max_position_embeddings=16, **sizes))
    else:
        model = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True)
    names: list[dict[str, list[list[str]]]] = []
    for training in (True, False):
        graph = split_randomness(trace(model, (torch.randn(4, 8, 24) if kind == "encoder" else tokens,), {}, training=training))
        axes = find_axes(graph.graph)
        of_axes = axis_names(graph, axes)
        found = {original: axes.of(name) for name, original in graph.parameters.items() if name in axes.tensors}
        names.append({original: [[of_axes[axis] for axis in each] for each in dimensions] for original, dimensions in found.items()})
    assert names[0] == names[1]
    bases = {name.partition("[")[0] for dimensions in names[0].values() for each in dimensions for name in each}
    assert {"heads", "head", "ffn", "hidden"} <= bases


def test_a_name_means_all_of_its_kind_and_a_number_one() -> None:
    graph, axes = analysed(Classifier(), torch.randint(19, (BATCH, LENGTH)), torch.randint(11, (BATCH,)))
    names = axis_names(graph, axes)
    both = axes_named("vocab", names)
    assert {axes.sizes[axis] for axis in both} == {19, 11}
    assert axes_named("vocab[0]", names) == both[:1]
    assert short_names(both, names) == ("vocab",)
    assert short_names(both[:1], names) == ("vocab[0]",)
    with pytest.raises(ConfigError, match=r"no axis 'experts'.*\n.*ffn.*heads"):
        axes_named("experts", names)


def test_the_batch_is_symbolic_and_one_axis() -> None:
    graph, axes = analysed(FusedAttention(), torch.randn(BATCH, LENGTH, WIDTH))
    (batch,) = batch_axes(graph, axes)
    assert axes.sizes[batch] == graph.batch
    assert of_result(graph, axes)[0] == (batch,)


class RowsOfTokens(nn.Module):
    """The batch is merged with the sequence and parted again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.layer(x.flatten(0, 1))
        return rows, rows.view(-1, x.shape[1], WIDTH)


def test_a_merged_batch_keeps_its_axes() -> None:
    graph, axes = analysed(RowsOfTokens(), torch.randn(BATCH, LENGTH, WIDTH))
    (batch,) = batch_axes(graph, axes)
    merged, parted = of_result(graph, axes, 0), of_result(graph, axes, 1)
    assert merged[0] == (batch, *parted[1])
    assert parted[0] == (batch,)


def test_an_operation_without_a_rule_is_named_and_keeps_its_axes_apart() -> None:
    class Unruled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.rot90(x, 1, (1, 2))

    graph, axes = analysed(Unruled(), torch.randn(BATCH, 4, 3))
    assert any("rot90" in operator for operator in axes.unruled.values())
    given = axes.of(next(leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None))
    assert not {axis for each in given for axis in each} & {axis for each in of_result(graph, axes) for axis in each}


# -- chains of reshapes ------------------------------------------------------------------------------------------------------------------

SHAPES = [shape for length in (1, 2, 3, 4) for shape in itertools.product((2, 3, 4, 6, 12, 24), repeat=length) if math.prod(shape) == 24]
Move = Callable[[Tensor], Tensor]


class Chain(nn.Module):
    def __init__(self, moves: Sequence[Move]) -> None:
        super().__init__()
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        for move in self.moves:
            x = move(x)
        return x * 1


def chains() -> st.SearchStrategy[list[tuple[str, Any]]]:
    reshape = st.tuples(st.just("reshape"), st.sampled_from(SHAPES))
    transpose = st.tuples(st.just("transpose"), st.tuples(st.integers(0, 3), st.integers(0, 3)))
    return st.lists(st.one_of(reshape, transpose), min_size=1, max_size=6)


def move_of(kind: str, value: Any) -> Move:
    """Without the first dimension, which stays."""
    if kind == "reshape":
        return lambda x: x.reshape(x.shape[0], *value)
    one, other = value
    return lambda x: x.transpose(1 + one % (x.dim() - 1), 1 + other % (x.dim() - 1))


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(st.sampled_from(SHAPES), chains())
def test_a_cut_in_front_of_reshapes_is_the_cut_behind_them(shape: tuple[int, ...], chain: list[tuple[str, Any]]) -> None:
    """An axis of the input that the result has, too: one index of it, taken by hand before, is the same index taken after."""
    model = Chain([move_of(kind, value) for kind, value in chain])
    x = torch.arange(2 * 24).reshape(2, *shape)
    graph, axes = analysed(model, x, batch_size=2)
    before = axes.of(next(leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None))
    after, result = of_result(graph, axes), model(x)
    flat_before, flat_after = ([axis for dimension in each for axis in dimension] for each in (before, after))
    assert math.prod(int(axes.sizes[axis]) for axis in flat_after) == 48
    unfolded = x.reshape([int(axes.sizes[axis]) for axis in flat_before])
    unfolded_result = result.reshape([int(axes.sizes[axis]) for axis in flat_after])
    for axis in set(flat_before) & set(flat_after):
        for index in range(int(axes.sizes[axis])):
            taken = unfolded.select(flat_before.index(axis), index)
            there = unfolded_result.select(flat_after.index(axis), index)
            assert torch.equal(taken.flatten().sort().values, there.flatten().sort().values)
    if all(kind == "transpose" for kind, _ in chain):
        assert sorted(flat_before) == sorted(flat_after), "a permutation keeps every axis"
