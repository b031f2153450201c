"""Attention over ranks that shard the sequence: gathered keys and values, heads exchanged for the sequence (Ulysses), or a ring."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.long_context import Subject
from partitioner import Constraints, PartitionedModel, Plan, partition
from passes.ir.comm.primitives import halo_exchange
from passes.ir.errors import ConfigError
from passes.ir.plan import ATTENTION
from passes.spmd.decompose.attention_block import attention_block
from tests.support.models.attention.gpt import FOUR_TOKENS
from tests.support.running.slow_values import slow
from tests.support.running.transparency import first_difference

LENGTH, WIDTH, HEADS = 8, 16, 4


class Attention(nn.Module):
    """Attention with projections; keys and values may have fewer heads than queries."""

    def __init__(self, heads: int = HEADS, kv_heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.options = heads, kv_heads, options
        size = WIDTH // heads
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv_heads * size), nn.Linear(WIDTH, kv_heads * size)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(*x.shape[:2], heads, WIDTH // self.heads).transpose(1, 2)

        q, k, v = split(self.query(x), self.heads), split(self.key(x), self.kv_heads), split(self.value(x), self.kv_heads)
        grouped = {"enable_gqa": True} if self.heads != self.kv_heads else {}
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **grouped, **self.options)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def _partitioned(
    model: nn.Module, devices: int, inputs: tuple[Tensor, ...], attention: str | None, mode: Any = "sequence"
) -> PartitionedModel:
    constraints = None if attention is None else Constraints(attention=attention)
    return partition(model, devices, mode, example_inputs=inputs, constraints=constraints, progress=False)


def _assert_equal(model: nn.Module, devices: int, inputs: tuple[Tensor, ...], attention: str, seed: int = 0) -> PartitionedModel:
    """Check output and all gradients against the unpartitioned model."""
    pm, reference = _partitioned(model, devices, inputs, attention), copy.deepcopy(model)
    x = inputs[0].clone().requires_grad_()
    own = inputs[0].clone().requires_grad_()
    torch.manual_seed(seed)
    expected = reference(own, *inputs[1:])
    expected.square().mean().backward()
    torch.manual_seed(seed)
    output = pm(x, *inputs[1:])
    output.square().mean().backward()
    assert pm.plan.attention == attention
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(x.grad, own.grad, rtol=0, atol=1e-12)
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
    return pm


def _inputs(mask: str = "", length: int = LENGTH) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    x = torch.rand(2, length, WIDTH, dtype=torch.float64)
    if not mask:
        return (x,)
    padded = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    padded[0, :, :, :3] = False  # rows of the first sample that attend to nothing, too
    return (x, padded if mask == "bool" else torch.zeros(padded.shape, dtype=torch.float64).masked_fill(~padded, -3.0))


def _sent(pm: PartitionedModel, kind: str) -> Counter[str]:
    """Return bytes of each collective of one rank's training step, in its forward (``"F"``) or backward (``"B"``)."""
    sent: Counter[str] = Counter()
    for node in pm.graph(0).graph.nodes:
        if "bytes" in node.meta and kind in str(node.meta.get("section")):
            sent[node.target.__name__] += node.meta["bytes"]
    return sent


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"is_causal": True}, ""),
    "bidirectional": ({}, ""),
    "grouped": ({"kv_heads": 2, "is_causal": True}, ""),
    "masked": ({"scale": 0.3, "kv_heads": 2}, "bool"),
    "biased": ({}, "float"),
}


@pytest.mark.parametrize("case", ["grouped", *slow("masked", "causal", "bidirectional", "biased")])
def test_heads_are_exchanged_for_the_sequence(case: str) -> None:
    options, mask = CASES[case]
    pm = _assert_equal(Attention(**options).double(), 2, _inputs(mask), "ulysses")
    assert "all_gather" not in _sent(pm, "B")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "devices"),
    [("grouped", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("masked", 4), ("causal", 4), ("bidirectional", 2)))],
)
def test_keys_and_values_go_round_a_ring(case: str, devices: int) -> None:
    """With a mask, some rows attend to nothing at all, and others to nothing of some blocks."""
    options, mask = CASES[case]
    pm = _assert_equal(Attention(**options).double(), devices, _inputs(mask), "ring")
    programs = [pm.graph(rank).graph.nodes for rank in range(devices)]
    assert all(any(node.target is halo_exchange for node in nodes) for nodes in programs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [(2, {"kv_heads": 2}), (3, {"scale": 0.3}), (4, {"kv_heads": 1}), (5, {})],
)
def test_causal_attention_in_zigzag_order(devices: int, options: dict[str, Any]) -> None:
    """Of 2n pieces of the keys, a rank attends to 2n + 1 in its two pieces of queries: a causal mask hides the others."""
    pm = _assert_equal(Attention(is_causal=True, **options).double(), devices, _inputs(length=4 * devices), "zigzag")
    for rank in range(devices):
        sections = [node.meta.get("section") for node in pm.graph(rank).graph.nodes if node.target is attention_block]
        assert len(sections) == 2 * devices + 1


@pytest.mark.slow
def test_zigzag_beside_attention_without_a_causal_mask() -> None:
    """Attention to all positions goes round as a ring, without another order."""
    model = nn.Sequential(Attention(is_causal=True), Attention()).double()
    pm = _assert_equal(model, 2, _inputs(), "zigzag")
    assert pm.plan.notes == _partitioned(model, 2, _inputs(), "ring").plan.notes
    blocks = [node for node in pm.graph(0).graph.nodes if node.target is attention_block]
    assert len(blocks) == 5 + 2


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", "zigzag"])
def test_attention_in_half_precision(attention: str) -> None:
    """Sums over blocks are in single precision: as close to the model in double precision as the model's own bfloat16 is, or twice that."""
    model = Attention(is_causal=True, kv_heads=2).double()
    x = _inputs(length=32)[0]
    exact, half = model(x), copy.deepcopy(model).bfloat16()(x.bfloat16())
    pm = _partitioned(copy.deepcopy(model).bfloat16(), 4, (x.bfloat16(),), attention)
    assert (pm(x.bfloat16()) - exact).abs().max() <= 2 * (half - exact).abs().max()


@pytest.mark.slow
def test_values_of_another_width_than_keys() -> None:
    """No fused kernel takes them."""

    class Wide(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k = (linear(x).unflatten(2, (HEADS, 4)).transpose(1, 2) for linear in (self.query, self.key))
            v = torch.cat([self.value(x), x], 2).unflatten(2, (HEADS, 8)).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2)[..., :WIDTH])

    for attention in ("ring", "zigzag"):
        _assert_equal(Wide().double(), 2, _inputs(), attention)


@pytest.mark.slow
def test_a_ring_in_every_recomputation_policy() -> None:
    x = _inputs()[0]
    model = nn.Sequential(Attention(is_causal=True), Attention(is_causal=True)).double()
    reference = copy.deepcopy(model)
    expected = nn.functional.mse_loss(reference(x), x)
    expected.backward()
    for recompute, attention in itertools.product(("none", "selective", "full"), ("ring", "zigzag")):
        constraints = Constraints(attention=attention)
        pm = partition(model, 2, "sequence", example_inputs=(x,), constraints=constraints, recompute=recompute, progress=False)
        torch.testing.assert_close(pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss), expected)
        for name, gradient in pm.full_gradients().items():
            torch.testing.assert_close(
                gradient, reference.get_parameter(name).grad, rtol=0, atol=1e-12, msg=f"{recompute} {attention} {name}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "length"), [(3, 7), (4, 8)])
def test_parts_may_be_uneven(devices: int, length: int) -> None:
    _assert_equal(Attention(is_causal=True).double(), devices, _inputs(length=length), "ulysses")


@pytest.mark.slow
def test_attention_with_dropout_draws_the_masks_of_one_device() -> None:
    _assert_equal(Attention(dropout_p=0.3, is_causal=True).double(), 2, _inputs(), "ulysses", seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "kv_heads"), [("ring", 4), ("ulysses", 8), ("zigzag", 4)])
def test_bytes_are_those_of_the_paper(attention: str, kv_heads: int) -> None:
    """Counted from the programs of the benchmark's model; of the ring with grouped heads, so that keys are smaller than queries."""
    subject = Subject(attention, ranks=4, length=8, kv_heads=kv_heads, layers=1)
    assert subject.sent == pytest.approx(subject.paper)


@pytest.mark.slow
def test_memory_stays_flat_while_sequence_and_ranks_double_together() -> None:
    """From four ranks on; of two, one block of keys and values fewer is under way."""
    two, four, eight = (Subject("ring", ranks, 128 * ranks).memory for ranks in (2, 4, 8))
    assert four == eight < 1.1 * two
    gathered = [Subject("gather", ranks, 128 * ranks).memory for ranks in (2, 8)]
    assert gathered[1] > 1.5 * gathered[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sequence", {"data": 2, "sequence": 2}, {"tensor": 2, "sequence": 2}, {"pipeline": 2, "sequence": 2}])
@pytest.mark.parametrize("attention", ["ulysses", "ring", "zigzag"])
def test_a_model_trains_like_the_original(mode: Any, attention: str) -> None:
    devices, constraints = 2 if isinstance(mode, str) else 4, Constraints(attention=attention)
    assert first_difference(FOUR_TOKENS, n_microbatches=1, devices=devices, mode=mode, constraints=constraints) is None


@pytest.mark.slow
def test_the_planner_takes_the_faster_way() -> None:
    """Of different predictions the lower; of equal ones, the first of ``ATTENTION``."""
    model, inputs = Attention(is_causal=True).double(), _inputs()
    chosen = _partitioned(model, 2, inputs, None).plan
    steps = {attention: _partitioned(model, 2, inputs, attention).plan.step_time for attention in ATTENTION}
    assert chosen.step_time == min(steps.values())
    assert chosen.attention == min(steps, key=steps.__getitem__)


@pytest.mark.parametrize(
    ("options", "mask", "devices", "attention", "reason"),
    [
        ({"heads": 2, "kv_heads": 2}, "", 3, "ulysses", "no attention of the model has heads that 3 ranks"),
        ({}, "", 3, "ring", "can send its keys and values round 3 ranks"),
        pytest.param({}, "", 2, "zigzag", "gives 2 ranks an early and a late piece", marks=pytest.mark.slow),
        pytest.param({}, "float", 2, "ring", "can send its keys and values round 2 ranks", marks=pytest.mark.slow),
        pytest.param({"dropout_p": 0.1}, "", 2, "ring", "can send its keys and values round 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_attention_that_cannot_be_shared_so_is_refused(
    options: dict[str, Any], mask: str, devices: int, attention: str, reason: str
) -> None:
    """Too few heads; a sequence that the ranks do not divide; a mask that may have a gradient; dropout."""
    with pytest.raises(ConfigError, match=reason):
        _partitioned(Attention(**options).double(), devices, _inputs(mask), attention)


def _llama(kv_heads: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 31}
    config = transformers.LlamaConfig(num_key_value_heads=kv_heads, max_position_embeddings=16, use_cache=False, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config).double()
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "masked"), [*((each, False) for each in ATTENTION), *((each, True) for each in ATTENTION[:-1])])
def test_llama_with_grouped_heads(attention: str, masked: bool) -> None:
    """Logits and gradients in float64, by a loss of the logits in float64; a mask pads the first sample on the left.

    Without it, the library's mask of positions is a causal one, which can be in zigzag order.
    """
    model, tokens = _llama(kv_heads=2), torch.randint(31, (2, 8))
    inputs = {"input_ids": tokens} | ({"attention_mask": torch.ones(2, 8, dtype=torch.long)} if masked else {})
    if masked:
        inputs["attention_mask"][0, :3] = 0
    pm = partition(model, 2, "sequence", example_kwargs=inputs, constraints=Constraints(attention=attention), progress=False)
    reference = copy.deepcopy(model)
    expected, output = reference(**inputs).logits, pm(**inputs).logits
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-9)
    expected[:, 3:].square().mean().backward()
    output[:, 3:].square().mean().backward()
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-9, msg=name)


def test_unfit_requests_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="there is no attention='flash'"):
        Constraints(attention="flash")
    with pytest.raises(ConfigError, match="names the mesh dimension 'sequence', and the mesh has data"):
        _partitioned(Attention().double(), 2, _inputs(), "ulysses", "data")


def test_the_choice_is_part_of_the_plan() -> None:
    model, inputs = Attention(is_causal=True).double(), _inputs()
    plan = _partitioned(model, 2, inputs, "ulysses").plan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.attention == "ulysses"
    pm = partition(model, 2, "sequence", example_inputs=inputs, plan=again, progress=False)
    torch.testing.assert_close(pm(*inputs), model(*inputs))
    with pytest.raises(ConfigError, match=r"plan\.attention: there is no 'flash'"):
        Plan.from_json(plan.to_json().replace('"ulysses"', '"flash"'))
