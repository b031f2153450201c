"""Axes that a user ties to mesh dimensions, by name or by pattern: they are cut there, and what cannot be is refused by name."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, PartitionedModel, partition
from passes.ir.comm import primitives as communication
from passes.ir.errors import ConfigError
from tests.support.models.attention.gpt import Block
from tests.support.models.zoo import case_named
from tests.support.running.transparency import first_difference, make_partitioned

WIDTH, LENGTH = 12, 6

SEQUENCE_BESIDE = Constraints(axes={"sequence": "tensor"})


class Llama(nn.Module):
    """The names and shapes of a LLaMA feed-forward layer, in two layers after an embedding; a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(WIDTH, 20), "down_proj": nn.Linear(20, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp["down_proj"](nn.functional.gelu(self.mlp["up_proj"](x)))


def square(output: Tensor, _target: Any) -> Tensor:
    return output.square().mean()


def equal_after_a_step(model: nn.Module, *args: Tensor, **arguments: Any) -> PartitionedModel:
    """Partition, take a step, compare loss and gradients with the original's in float64."""
    model = model.double()
    pm = partition(model, example_inputs=args, progress=False, **arguments)
    loss = pm.train_step(*args, target=None, loss_fn=square)
    reference = copy.deepcopy(model)
    expected = square(reference(*args), None)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
    return pm


def collectives(pm: PartitionedModel) -> dict[str, list[tuple[str, int]]]:
    """Return rank 0's collectives of activations: section of its program -> collectives and their bytes."""
    functions = (communication.all_reduce, communication.all_gather, communication.reduce_scatter)
    found: dict[str, list[tuple[str, int]]] = {"0F0": [], "0B0": []}
    for node in pm.graph(0).graph.nodes:
        section = str(node.meta.get("section"))
        if node.target in functions and section in found:
            found[section].append((node.target.__name__, node.meta["bytes"]))
    return found


def shape_of(pm: PartitionedModel, name: str) -> tuple[int, ...]:
    return tuple(dict(pm.named_parts(0))[name].shape)


# -- axes ----------------------------------------------------------------------------------------------------------------------------


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(WIDTH, 4), Block(WIDTH, 4))


@pytest.mark.slow
def test_sequence_beside_tensor_gathers_and_scatters_instead_of_reducing() -> None:
    x = torch.rand(2, LENGTH, WIDTH, dtype=torch.float64)
    plain = equal_after_a_step(blocks(), x, devices=2, mode="tensor", constraints=Constraints(axes={"heads": "tensor", "ffn": "tensor"}))
    beside = equal_after_a_step(
        blocks(), x, devices=2, mode="tensor", constraints=Constraints(axes={"heads": "tensor", "ffn": "tensor", "sequence": "tp"})
    )
    assert ("sequence", "tensor") in beside.plan.axes
    # Two sums a block, forward and backward; each becomes a scatter and a gather. At the end the result is gathered.
    whole, half = 2 * LENGTH * WIDTH * 8, LENGTH * WIDTH * 8
    assert collectives(plain) == {"0F0": [("all_reduce", whole)] * 4, "0B0": [("all_reduce", whole)] * 4}
    found = collectives(beside)
    assert Counter(found["0F0"]) == {("reduce_scatter", whole): 4, ("all_gather", half): 5}
    assert Counter(found["0B0"]) == {("reduce_scatter", whole): 4, ("all_gather", half): 4}
    for name in ("0.query_key_value.weight", "0.up.weight"):
        assert shape_of(beside, name) == shape_of(plain, name) != tuple(blocks().get_parameter(name).shape)
    beside.verify()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_sequence_beside_tensor_trains_like_the_original(devices: int) -> None:
    """6 tokens and 3 heads over 4 ranks: parts are uneven, and heads cannot be cut at all."""
    assert first_difference(case_named("gpt"), n_microbatches=1, devices=devices, mode="tensor", constraints=SEQUENCE_BESIDE) is None


@pytest.mark.slow
def test_one_axis_of_several_is_named_by_its_number() -> None:
    x = torch.rand(2, LENGTH, WIDTH, dtype=torch.float64)
    pm = equal_after_a_step(blocks(), x, devices=2, mode="tensor", constraints=Constraints(axes={"ffn[1]": "tensor"}))
    assert shape_of(pm, "1.up.weight") == (2 * WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("axes", "mode", "words"),
    [
        ({"heads": "foo"}, "tensor", ("'foo'", "a mesh may have the dimensions model, pipeline, tensor")),
        ({"heads": "sequense"}, "tensor", ("'sequense'", "did you mean 'sequence'?")),
        pytest.param({"head_count": "tensor"}, "tensor", ("no axis 'head_count'", "heads", "ffn"), marks=pytest.mark.slow),
        ({"heads": "expert"}, "tensor", ("'expert'", "the mesh has tensor")),
        pytest.param({"heads": "tensor"}, "pipeline", ("'tensor'", "the mesh has pipeline"), marks=pytest.mark.slow),
        ({"heads": "pipeline"}, "pipeline", ("cuts the graph",)),
        pytest.param({"head_count": "tensor"}, "auto", ("no axis 'head_count'", "heads", "ffn"), marks=pytest.mark.slow),
        pytest.param({"heads": "expert"}, "auto", ("'expert'", "the mesh has pipeline"), marks=pytest.mark.slow),
        pytest.param({"heads": "data"}, "data", ("cuts the batch, and experts beside it",), marks=pytest.mark.slow),
        pytest.param({"batch": "tensor"}, "tensor", ("any axis but the batch",), marks=pytest.mark.slow),
        ({"heads": "tensor"}, {"tensor": 8}, ("size 4", "8 parts")),
    ],
)
def test_axes_that_cannot_be_kept(axes: dict[str, str], mode: str | Mapping[str, int], words: tuple[str, ...]) -> None:
    devices = 8 if mode == {"tensor": 8} else 2
    with pytest.raises(ConfigError) as caught:
        partition(
            blocks(), devices, mode, example_inputs=(torch.rand(2, LENGTH, WIDTH),), constraints=Constraints(axes=axes), progress=False
        )
    assert all(word in str(caught.value) for word in words), caught.value


# -- patterns ------------------------------------------------------------------------------------------------------------------------

FEED_FORWARD = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


def llama(tp_plan: dict[str, str], devices: int = 2) -> PartitionedModel:
    torch.manual_seed(0)
    return equal_after_a_step(
        Llama(), torch.randint(10, (2, LENGTH)), devices=devices, mode="tensor", constraints=Constraints(tp_plan=tp_plan)
    )


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_columns_are_made_and_rows_are_summed(devices: int) -> None:
    pm = llama(FEED_FORWARD, devices)
    own = len(torch.arange(20).tensor_split(devices)[0])
    for layer in range(2):
        assert shape_of(pm, f"layers.{layer}.mlp.up_proj.weight") == (own, WIDTH)
        assert shape_of(pm, f"layers.{layer}.mlp.up_proj.bias") == (own,)
        assert shape_of(pm, f"layers.{layer}.mlp.down_proj.weight") == (WIDTH, own)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["rowwise", "embedding_rowwise"])
def test_the_rows_of_an_embedding_are_its_words(style: str) -> None:
    assert shape_of(llama({"embed_tokens": style}), "embed_tokens.weight") == (5, WIDTH)


@pytest.mark.slow
def test_the_columns_of_an_embedding_are_its_features() -> None:
    assert shape_of(llama({"embed_tokens": "colwise"}), "embed_tokens.weight") == (10, WIDTH // 2)


@pytest.mark.slow
def test_what_leaves_whole_is_cut_all_the_same() -> None:
    assert shape_of(llama({"lm_head": "colwise_rep"}), "lm_head.weight") == (5, WIDTH)


@pytest.mark.slow
def test_a_transposed_weight_keeps_its_meaning() -> None:
    """GPT-2's Conv1D holds its weight as (in, out)."""
    instance = case_named("gpt2").build()
    pm = make_partitioned(instance, devices=2, mode="tensor", constraints=Constraints(tp_plan={"h.*.mlp.c_fc": "colwise"}))
    whole = dict(instance.model.named_parameters())
    name = next(name for name in whole if name.endswith("h.0.mlp.c_fc.weight"))
    assert shape_of(pm, name) == (whole[name].shape[0], whole[name].shape[1] // 2)


@pytest.mark.parametrize(
    ("tp_plan", "words"),
    [
        ({"layers.*.mlp.gate": "colwise"}, ("layers.*.mlp.gate", "matches no module", "layers.*.mlp.up_proj")),
        ({"layers.*.mlp.up_proj": "columns"}, ("layers.*.mlp.up_proj", "'columns'", "colwise")),
    ],
)
def test_patterns_that_cannot_be_kept(tp_plan: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        llama(tp_plan)
    assert all(word in str(caught.value) for word in words), caught.value


def test_patterns_need_a_tensor_dimension() -> None:
    with pytest.raises(ConfigError, match="tp_plan"):
        partition(Llama(), 2, "data", example_inputs=(torch.randint(10, (2, LENGTH)),), constraints=Constraints(tp_plan=FEED_FORWARD))


@pytest.mark.slow
def test_a_dimension_of_one_rank_holds_all_that_it_would_cut() -> None:
    model, x = blocks(), torch.randn(2, LENGTH, WIDTH)
    named = Constraints(axes={"heads": "tp", "batch": "data"}, tp_plan={"*.up": "colwise"})
    pm = partition(model, 2, {"data": 2, "tp": 1}, example_inputs=(x,), constraints=named, progress=False)
    assert pm.plan.mesh == (("data", 2),)
    torch.testing.assert_close(pm(x), model(x))
