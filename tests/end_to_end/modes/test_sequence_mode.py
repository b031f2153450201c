"""Mode "sequence": activations cut along the sequence, parameters whole; attention compares own queries with everybody's keys."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, partition
from passes.ir.comm import primitives as communication
from passes.ir.errors import ConfigError
from tests.support.models.attention.gpt import VOCABULARY, Block, Gpt
from tests.support.models.zoo import case_named
from tests.support.running.transparency import first_difference

WIDTH, LENGTH = 12, 5


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param("gpt", 2, marks=pytest.mark.slow),
        pytest.param("vit", 2, marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gpt", 3), ("llama", 2), ("bert", 3))),
    ],
)
def test_trains_like_the_original(name: str, devices: int) -> None:
    assert first_difference(case_named(name), n_microbatches=1, devices=devices, mode="sequence") is None


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit", "gpt2"])
def test_all_train_like_the_original(name: str, devices: int) -> None:
    assert first_difference(case_named(name), n_microbatches=1, devices=devices, mode="sequence") is None


@pytest.mark.slow
def test_beside_tensor() -> None:
    mesh = {"sequence": 2, "tensor": 2}
    assert first_difference(case_named("gpt"), n_microbatches=1, devices=4, mode=mesh) is None


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
def test_keys_and_values_alone_are_gathered(devices: int) -> None:
    """5 positions over 2 and 3 ranks: the parts are uneven, and each has a causal mask of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(WIDTH, 3), Block(WIDTH, 3)).double()
    x = torch.rand(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    pm = partition(model, devices, "sequence", example_inputs=(x,), progress=False)
    reference, own = copy.deepcopy(model), x.detach().clone().requires_grad_()
    expected = reference(own)
    expected.square().mean().backward()
    output = pm(x)
    torch.testing.assert_close(output, expected)
    output.square().mean().backward()
    torch.testing.assert_close(x.grad, own.grad)
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
        assert dict(pm.named_parts(0))[name].shape == parameter.shape
    nodes = pm.graph(0).graph.nodes
    forward = [node.target for node in nodes if str(node.meta.get("section")) == "0F0" and "bytes" in node.meta]
    # Keys and values of both blocks, and the result.
    assert forward == [communication.all_gather] * 5


class Decoded(nn.Module):
    """Memory is shorter than the sequence, and both over 3 ranks leave some a single position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(4, 4), nn.TransformerDecoderLayer(4, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.layer(h, h[:, 1:] * 0.5)


@pytest.mark.slow
def test_ranks_with_one_position_start_collectives_as_the_others_do() -> None:
    """Of one position a projection is other calls, whose gradients are there in another order."""
    torch.manual_seed(0)
    model, x = Decoded().double(), torch.rand(8, 4, 4, dtype=torch.float64)
    pm = partition(model, 3, "sequence", example_inputs=(x,), progress=False)
    reference = copy.deepcopy(model)
    reference(x).square().mean().backward()
    pm(x).square().mean().backward()
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


class Bidirectional(nn.Module):
    """Attention of a mask that is given, and of one that is not."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return nn.functional.scaled_dot_product_attention(mixed, mixed, mixed)


def test_masks_are_cut_with_their_queries() -> None:
    x, mask = torch.rand(2, 3, LENGTH, 4, dtype=torch.float64), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1)
    pm = partition(Bidirectional(), 2, "sequence", example_inputs=(x, mask), progress=False)
    torch.testing.assert_close(pm(x, mask), Bidirectional()(x, mask))


@pytest.mark.parametrize("arguments", [{}, {"enable_gqa": True}, pytest.param({"scale": 0.3}, marks=pytest.mark.slow)])
def test_causal_attention_by_itself(arguments: dict[str, Any]) -> None:
    class Causal(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, **arguments)

    heads = 2 if "enable_gqa" in arguments else 4
    query = torch.rand(2, 4, LENGTH, 3, dtype=torch.float64)
    key, value = torch.rand(2, 2, heads, LENGTH, 3, dtype=torch.float64).unbind(0)
    pm = partition(Causal(), 2, "sequence", example_inputs=(query, key, value), progress=False)
    torch.testing.assert_close(pm(query, key, value), Causal()(query, key, value))
    assert any("local_index" in node.name or "le" in node.name for node in pm.sharded_for(2)[1].graph.graph.nodes)


def test_a_model_without_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="no axis 'sequence'"):
        partition(nn.Linear(4, 4), 2, "sequence", example_inputs=(torch.rand(2, 4),), progress=False)


def test_a_sequence_that_another_dimension_cuts_is_not_cut_twice() -> None:
    model, x = Block(WIDTH, 3), torch.rand(2, LENGTH, WIDTH)
    constraints = Constraints(axes={"sequence": "tensor"})
    with pytest.raises(ConfigError, match="nothing is left"):
        partition(model, 4, {"sequence": 2, "tensor": 2}, example_inputs=(x,), constraints=constraints, progress=False)


class Sorted(nn.Module):
    """Logits of all positions in one dimension, each sorted: a calculation that needs all words of a position."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt(16, 4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        ranked = self.gpt(tokens).flatten(0, 1).sort(-1).values
        return (ranked * torch.arange(VOCABULARY)).square().mean()


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_logits_are_exchanged_for_positions_inside_a_flattened_dimension(devices: int) -> None:
    """No rank has all words of all positions; 23 words and 6 positions are uneven parts."""
    torch.manual_seed(0)
    model, tokens = Sorted().double(), torch.randint(VOCABULARY, (4, 6))
    original = copy.deepcopy(model)
    pinned = Constraints(axes=dict.fromkeys(("heads", "ffn", "vocab", "sequence"), "tensor"))
    pm = partition(model, devices, "tensor", example_inputs=(tokens,), constraints=pinned, progress=False)
    expected = original(tokens)
    expected.backward()
    torch.testing.assert_close(pm.train_step(tokens), expected)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, original.get_parameter(name).grad, msg=name)
    for graph in pm.graphs:
        exchanges = [node for node in graph.graph.nodes if node.target is communication.all_to_all]
        assert len(exchanges) == 4  # logits, their order, and the gradients of both
        values = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
        of_all_words = [value for value in values if tuple(value.shape[-1:]) == (VOCABULARY,)]
        assert of_all_words
        assert all(int(value.numel()) < tokens.numel() * VOCABULARY for value in of_all_words)
