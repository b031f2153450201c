"""One projection of queries, keys and values with unequal numbers of heads is stored and computed by groups of heads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Phi3Config, Phi3ForCausalLM

from partitioner import Constraints, PartitionedModel, draw_weight, partition
from tests.support.running.slow_values import slow

WIDTH, HEAD, LENGTH, ROWS = 24, 4, 8, 4
SEQUENCE = Constraints(axes={"heads": "tensor", "sequence": "tensor"})
HEADS = Constraints(axes={"heads": "tensor"})

Reads = Literal["slice", "split", "narrow", "returned", "elements"]


class Attention(nn.Module):
    """Attention with one projection, which ``reads`` says how to take apart, or what else reads it."""

    def __init__(self, queries: int, keys: int, reads: Reads = "slice", *, bias: bool = True) -> None:
        super().__init__()
        self.queries, self.keys, self.reads = queries, keys, reads
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (queries + 2 * keys) * HEAD, bias=bias)
        self.out = nn.Linear(queries * HEAD, WIDTH, bias=bias)

    def pieces(self, y: Tensor) -> tuple[Tensor, ...]:
        first, second = self.queries * HEAD, self.keys * HEAD
        if self.reads == "split":
            return torch.split_with_sizes(y, [first, second, second], dim=-1)
        if self.reads == "narrow":
            return y.narrow(-1, 0, first), y.narrow(-1, first, second), y.narrow(-1, first + second, second)
        return y[..., :first], y[..., first : first + second], y[..., first + second :]

    def forward(self, x: Tensor) -> Any:
        y = self.qkv(self.norm(x))
        query, key, value = (piece.view(*x.shape[:2], -1, HEAD).transpose(1, 2) for piece in self.pieces(y))
        key, value = (each.repeat_interleave(self.queries // self.keys, 1) for each in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        if self.reads == "elements":
            return x + y.view(*x.shape[:2], -1, HEAD).cumsum(2).mean((2, 3), keepdim=True).flatten(2)
        return (x, y) if self.reads == "returned" else x


def values(result: Any) -> list[Tensor]:
    """Return the tensors of a result."""
    if isinstance(result, Tensor):
        return [result]
    return list(result) if isinstance(result, tuple) else [result.logits]


def assert_trains_alike(model: nn.Module, x: Tensor, mode: Mapping[str, int], constraints: Constraints | None = None) -> PartitionedModel:
    """Assert equal results, gradients and weights after a step, all in float64; return the partitioned model."""
    devices = 2 if len(mode) == 1 else 4
    devices = max(devices, *mode.values())
    options: dict[str, Any] = {"schedule": "1F1B", "n_microbatches": 2} if "pipeline" in mode else {}
    other = copy.deepcopy(model)
    partitioned = partition(other, devices=devices, mode=dict(mode), example_inputs=(x,), constraints=constraints, **options)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(partitioned.full_state_dict()[name], value, rtol=0, atol=0)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, partitioned)]
    for each, optimizer in zip((model, partitioned), optimizers, strict=True):
        torch.stack([value.sin().sum() for value in values(each(x))]).sum().backward()
        optimizer.step()
    expected = dict(model.named_parameters())
    for name, parameter in partitioned.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-9, atol=1e-9)
    for name, value in partitioned.full_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-7, atol=1e-7)
    with torch.no_grad():
        for own, wanted in zip(values(partitioned(x)), values(model(x)), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-7, atol=1e-7)
    return partitioned


def by_hand(*blocks: Attention) -> tuple[nn.Module, Tensor]:
    """Return a float64 model of these blocks and its input."""
    torch.manual_seed(0)
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    return nn.Sequential(*blocks).double(), torch.randn(ROWS, LENGTH, WIDTH).double()


OTHER_READS = (("split", False), ("narrow", True))
"""How attention reads the heads of a fused product, and whether it has a bias."""

MODES = [
    pytest.param({"tensor": 2}, HEADS, id="tensor"),
    pytest.param({"tensor": 2}, SEQUENCE, id="sequence"),
    pytest.param({"pipeline": 2, "tensor": 2}, HEADS, id="pipeline"),
    pytest.param({"fsdp": 2, "tensor": 2}, HEADS, id="fsdp"),
]


SLOW_MODES = [pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in MODES[1:]]


@pytest.mark.parametrize(("mode", "constraints"), MODES)
@pytest.mark.parametrize(("reads", "bias"), [("slice", True), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHER_READS)])
def test_by_hand(mode: dict[str, int], constraints: Constraints, reads: Reads, bias: bool) -> None:
    model, x = by_hand(*(Attention(6, 2, reads, bias=bias) for _ in range(2)))
    partitioned = assert_trains_alike(model, x, mode, constraints)
    if set(mode) == {"tensor"}:
        assert "rank 0 holds (20, 24)" in str(draw_weight(partitioned, "0.qkv.weight"))
        assert not [node for node in partitioned.graph(0).graph.nodes if "qkv" in node.name and "gather" in node.name]


@pytest.mark.parametrize(("mode", "constraints"), [MODES[0], *SLOW_MODES])
def test_phi3(mode: dict[str, int], constraints: Constraints) -> None:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        pad_token_id=0, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = Phi3ForCausalLM(config).double()
    partitioned = assert_trains_alike(model, torch.randint(1, 32, (ROWS, LENGTH)), mode, constraints)
    if set(mode) == {"tensor"}:
        assert "rank 0 holds (20, 24)" in str(draw_weight(partitioned, "model.layers.0.self_attn.qkv_proj.weight"))


def test_groups_that_ranks_do_not_divide() -> None:
    partitioned = assert_trains_alike(*by_hand(Attention(6, 3)), {"tensor": 2}, HEADS)
    drawn = str(draw_weight(partitioned, "0.qkv.weight"))
    assert "rank 0 holds (32, 24)" in drawn
    assert "rank 1 holds (16, 24)" in drawn


@pytest.mark.parametrize("mode", [{"tensor": 4}, *slow({"tensor": 2})])
@pytest.mark.parametrize("reads", ["returned", *slow("elements", "slice")])
def test_other_reads_and_fewer_groups_than_ranks(mode: dict[str, int], reads: Reads) -> None:
    """A projection that is returned is gathered by segments; one that is read by elements, or has too few groups, is stored otherwise."""
    assert_trains_alike(*by_hand(Attention(6, 2, reads)), mode)


def test_state_is_loaded_and_other_calls_share_it() -> None:
    model, x = by_hand(Attention(6, 2), Attention(6, 2, "split"))
    source, target = (partition(copy.deepcopy(model), devices=2, mode="tensor", example_inputs=(x,), constraints=HEADS) for _ in range(2))
    state = {name: torch.randn_like(value) for name, value in source.full_state_dict().items()}
    source.load_state_dict(state)
    target.load_state_dict(source.state_dict())
    model.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(target.eval()(x[:, :5]), model.eval()(x[:, :5]), rtol=1e-9, atol=1e-9)
    for name, value in target.full_state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
