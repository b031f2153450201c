"""Mixtures of experts of transformers, from config and as they come: version 5 sorts tokens by expert, 4.57 visits experts that are hit.

In float32: normalisations and routers compute in it, whatever the model is in. The tests of version 5 run where it is installed:
``make test-transformers-5``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import pytest
import torch
import transformers

from partitioner import PartitionedModel, TraceError, partition

IS_5 = int(version("transformers").partition(".")[0]) >= 5
sorts_tokens = pytest.mark.skipif(not IS_5, reason="needs transformers 5: earlier ones visit the experts that are hit, which is not traced")
visits_experts = pytest.mark.skipif(IS_5, reason="needs transformers 4")

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
    """The model after a step, with the loss and the gradients of the model in one piece."""
    original = copy.deepcopy(model)
    expected = original(**inputs()).loss
    expected.backward()
    pm = partition(model, devices, mode, example_kwargs=inputs(), progress=False, **options)
    torch.testing.assert_close(pm.train_step(**inputs()), expected)
    gradients = pm.full_gradients()
    for name, parameter in original.named_parameters():
        found = gradients[name]
        assert (found is None) == (parameter.grad is None), name
        if found is not None and parameter.grad is not None:
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5 * (1 + float(parameter.grad.abs().max())), msg=name)
    return pm


@sorts_tokens
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_cuts_the_batch(family: str) -> None:
    pm = trained(model_of(family), "pipeline", 2, n_microbatches=2)
    assert pm.plan.n_microbatches == 2
    assert not any("rows of the batch meet" in note for note in pm.plan.notes)


@sorts_tokens
@pytest.mark.parametrize(
    ("family", "mode", "devices"),
    [
        ("mixtral", {"data": 2, "tensor": 2}, 4),
        *(
            pytest.param(family, mode, devices, marks=pytest.mark.slow)
            for family in FAMILIES
            for mode, devices in (("tensor", 2), ("fsdp", 2), ("data", 4), ({"data": 2, "tensor": 2}, 4), ({"pipeline": 2, "tensor": 2}, 4))
        ),
    ],
)
def test_training(family: str, mode: str | Mapping[str, int], devices: int) -> None:
    trained(model_of(family), mode, devices)


@sorts_tokens
@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_experts_are_cut_inside(family: str) -> None:
    """Columns and rows of each expert, as a feed-forward layer; nothing is computed whole, nothing is gathered."""
    pm = partition(model_of(family), 2, "tensor", example_kwargs=inputs(), progress=False)
    held = {name: parameter.numel() for name, parameter in pm.named_parts(0)}
    whole = {name: parameter.numel() for name, parameter in model_of(family).named_parameters()}
    products = [name for name in whole if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert products
    assert [whole[name] // held[name] for name in products] == [2] * len(products)
    assert "Computed whole" not in pm.explain()


@sorts_tokens
def test_products_of_all_tokens() -> None:
    trained(model_of("mixtral", _experts_implementation="batched_mm"), "pipeline", 2, n_microbatches=2)


@pytest.mark.parametrize("family", [pytest.param("mixtral", marks=visits_experts), pytest.param("gpt_oss", marks=visits_experts)])
def test_visited_experts_are_refused_with_a_way_out(family: str) -> None:
    with pytest.raises(TraceError, match="values of a tensor decide") as caught:
        partition(model_of(family), 2, "pipeline", example_kwargs=inputs())
    assert "transformers>=5" in str(caught.value)


@sorts_tokens
def test_eager_experts_are_refused_with_a_way_out() -> None:
    with pytest.raises(TraceError, match="grouped_mm"):
        partition(model_of("mixtral", _experts_implementation="eager"), 2, "pipeline", example_kwargs=inputs())
