"""Plans that models of transformers ship, of tensor and of expert parallelism, are taken as they are, and train with equal numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from partitioner import Constraints, PartitionWarning, partition
from passes.ir.errors import ConfigError
from tests.end_to_end.families.families import FAMILIES

WITH_TENSOR_PLAN = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3",
    "olmo2", "cohere", "granite", "starcoder2", "gpt_neox", "gptj",
)  # fmt: skip
WITH_EXPERT_PLAN = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
QUICK = {("mixtral", "_ep_plan")}
EVERY = [*((name, "_tp_plan") for name in WITH_TENSOR_PLAN), *((name, "_ep_plan") for name in WITH_EXPERT_PLAN)]


def plan_of(model: Any, attribute: str) -> Mapping[str, str]:
    return {pattern: style for pattern, style in getattr(model, attribute).items() if isinstance(style, str)}


@pytest.mark.filterwarnings("ignore:tp_plan. the model has no modules for")
@pytest.mark.parametrize(("name", "attribute"), [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in EVERY])
def test_models_train_by_the_plans_that_they_ship(name: str, attribute: str) -> None:
    family = FAMILIES[name]
    model = family.model()
    inputs, target = family.batch(0)
    plan = plan_of(model, attribute)
    batch = {**inputs, "labels": target}
    pm = partition(model, 2, "tensor", example_kwargs=batch, constraints=Constraints(tp_plan=plan), progress=False)
    loss, gradients = pm.train_step(**batch), pm.full_gradients()
    reference = copy.deepcopy(model)
    expected = reference(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for path, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[path], parameter.grad, rtol=0, atol=1e-5 * float(parameter.grad.abs().max()), msg=path)
    stored, whole = dict(pm.named_parts(0)), dict(model.named_parameters())
    assert any(stored[path].numel() < whole[path].numel() for path in whole)
    matrices = [path for path in whole if ("experts" if attribute == "_ep_plan" else "o_proj.weight") in path and whole[path].dim() > 1]
    assert all(stored[path].numel() * 2 == whole[path].numel() for path in matrices if "bias" not in path and "shared" not in path)


def test_patterns_for_modules_that_a_configuration_leaves_out_are_named() -> None:
    """All layers have experts: there is no ``mlp.gate_proj``. A pattern of the user's own stays an error."""
    model = FAMILIES["qwen3_moe"].model()
    inputs, _ = FAMILIES["qwen3_moe"].batch(0)
    plan = plan_of(model, "_tp_plan")
    with pytest.warns(PartitionWarning, match=r"no modules for 'model\.layers\.\*\.mlp\.gate_proj'.* they are left out"):
        pm = partition(model, 2, "tensor", example_kwargs=inputs, constraints=Constraints(tp_plan=plan), progress=False)
    assert dict(pm.named_parts(0))["model.layers.0.self_attn.q_proj.weight"].shape[0] == 8
    with pytest.raises(ConfigError, match=r"'layers\.\*\.up' matches no module with parameters"):
        partition(model, 2, "tensor", example_kwargs=inputs, constraints=Constraints(tp_plan={"layers.*.up": "colwise"}))
