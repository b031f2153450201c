"""Mixtures of experts of transformers, from config and as they come: tokens are sorted by expert.

In float32: normalisations and routers compute in it, whatever the model is in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers

from partitioner import Constraints, PartitionedModel, TraceError, partition
from passes.ir.comm.expert_rows import route_rows

ROWS, LENGTH, WORDS = 4, 6, 32
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
ROUTED = {"num_experts_per_tok": 2, "intermediate_size": 24}

FAMILIES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **ROUTED, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **ROUTED, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **ROUTED, num_experts=4, moe_intermediate_size=24, head_dim=8),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES, **ROUTED, n_routed_experts=4, moe_intermediate_size=24, n_group=2, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **ROUTED, num_local_experts=4, head_dim=8, layer_types=["full_attention"] * 2),
}  # fmt: skip


def model_of(family: str, **attributes: Any) -> Any:
    config = FAMILIES[family]()
    for name, value in attributes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        for parameter in model.parameters():  # routers start as zeros, where all experts are equal
            parameter.data = torch.randn_like(parameter) * 0.2
    return model


def inputs() -> dict[str, Any]:
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def trained(model: Any, mode: str | Mapping[str, int], devices: int, **options: Any) -> PartitionedModel:
    """Return the model after a step, with the loss and the gradients of the unpartitioned model."""
    original = copy.deepcopy(model)
    expected = original(**inputs()).loss
    expected.backward()
    pm = partition(model, devices, mode, example_kwargs=inputs(), progress=False, **options)
    torch.testing.assert_close(pm.train_step(**inputs()), expected)
    gradients = pm.full_gradients()
    for name, parameter in original.named_parameters():
        found, wanted = gradients[name], parameter.grad
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * (1 + float(wanted.abs().max())), msg=name)
    return pm


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_cuts_the_batch(family: str) -> None:
    pm = trained(model_of(family), "pipeline", 2, n_microbatches=2)
    assert pm.plan.n_microbatches == 2
    assert not any("rows of the batch are mixed" in note for note in pm.plan.notes)


@pytest.mark.parametrize(
    ("family", "mode", "devices"),
    [
        pytest.param(family, mode, devices, marks=pytest.mark.slow)
        for family in FAMILIES
        for mode, devices in (("tensor", 2), ("fsdp", 2), ("data", 4), ({"data": 2, "tensor": 2}, 4), ({"pipeline": 2, "tensor": 2}, 4))
    ],
)
def test_training(family: str, mode: str | Mapping[str, int], devices: int) -> None:
    trained(model_of(family), mode, devices)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "devices"), [("data", 2), ("fsdp", 2), ({"data": 2, "tensor": 2}, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_go_to_their_experts(family: str, mode: str | Mapping[str, int], devices: int) -> None:
    """A rank stores half of the experts, and computes what all ranks send it."""
    dimension = mode if isinstance(mode, str) else "data"
    pm = trained(model_of(family), mode, devices, constraints=Constraints(axes={"experts": dimension}))
    assert sum(node.target is route_rows for node in pm.graph(0).graph.nodes) == (1 if family == "deepseek_v3" else 2)
    held = {name: tuple(parameter.shape) for name, parameter in pm.named_parts(0)}
    assert {shape[0] for name, shape in held.items() if name.endswith(("gate_up_proj", "down_proj")) and len(shape) == 3} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_cut_inside(family: str) -> None:
    """Columns and rows of each expert, as a feed-forward layer; nothing is computed whole, nothing is gathered."""
    pm = partition(model_of(family), 2, "tensor", example_kwargs=inputs(), progress=False)
    held = {name: parameter.numel() for name, parameter in pm.named_parts(0)}
    whole = {
        name: parameter.numel()
        for name, parameter in model_of(family).named_parameters()
        if ".experts." in name and not name.endswith("bias")
    }
    assert whole
    assert {count // held[name] for name, count in whole.items()} == {2}
    assert "Computed whole" not in pm.explain()


def test_batched_products() -> None:
    trained(model_of("mixtral", _experts_implementation="batched_mm"), "pipeline", 2, n_microbatches=2)


def test_a_loop_over_chosen_experts_is_refused_with_the_remedy() -> None:
    model = model_of("mixtral", _experts_implementation="eager")
    with pytest.raises(TraceError) as caught:
        partition(model, 2, "data", example_kwargs=inputs(), progress=False)
    assert 'model.set_experts_implementation("grouped_mm")' in (caught.value.remedy or "")
    model.set_experts_implementation("grouped_mm")
    trained(model, "data", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "constraints"),
    [
        ("pipeline", None),
        ("tensor", None),
        ("data", Constraints(axes={"experts": "data"})),
    ],
)
def test_generation(mode: str, constraints: Constraints | None) -> None:
    model = model_of("qwen3_moe").eval()
    prompt = inputs()["input_ids"]
    pm = partition(model, 2, mode, example_kwargs={"input_ids": prompt}, constraints=constraints, progress=False)
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(pm.generate(prompt, **options), model.generate(prompt, **options))


@pytest.mark.slow
def test_mixed_precision_is_torchs() -> None:
    """The products of experts are computed in bfloat16, as the model's are."""
    model = model_of("mixtral")
    pm = partition(copy.deepcopy(model), 2, "data", example_kwargs=inputs(), precision="bf16-mixed", progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs()).loss
    torch.testing.assert_close(pm.train_step(**inputs()), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_products_of_experts_are_not_recomputed_one_by_one() -> None:
    """They are contractions with weights, the most expensive part of the model."""
    plan = trained(model_of("mixtral"), "data", 2, recompute="selective").plan
    assert any(name.startswith("silu") for name in plan.recomputed)
    assert not any("grouped_mm" in name for name in plan.recomputed)
