"""Models with adapters of peft train as the plain ones do; adapters are saved, loaded, switched and merged as peft has it."""

# peft returns Any.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import ConfigError, PartitionedModel, partition
from tests.partitioner.integrations.peft.cases import KINDS, Net, adapted, batch, distance, lora, process_differences, train
from tests.support.processes.processes import Workers

MODES: dict[str, tuple[Any, int]] = {
    "pipeline": ("pipeline", 2),
    "fsdp": ("fsdp", 2),
    "tensor": ("tensor", 2),
    "data": ("data", 2),
    "pipelines": ({"data": 2, "pipeline": 2}, 4),
    "mesh": ({"fsdp": 2, "tensor": 2}, 4),
}
QUICK = {("ia3", "fsdp")}
ATOL = 1e-12


def partitioned(model: nn.Module, mode: str) -> PartitionedModel:
    """Partition in a mode, in one microbatch: those of a pipeline would draw dropout masks of their own."""
    what, n_devices = MODES[mode]
    return partition(
        model, n_devices, what, example_inputs=batch()[:1], n_microbatches=1 if "pipeline" in str(what) else None, progress=False
    )


@pytest.mark.parametrize(
    ("kind", "mode"),
    [pytest.param(kind, mode, marks=() if (kind, mode) in QUICK else (pytest.mark.slow,)) for kind in KINDS for mode in MODES],
)
def test_training(kind: str, mode: str) -> None:
    model = adapted(kind)
    pm = partitioned(model, mode)
    losses, optimizer = train(pm)
    expected, _ = train(model)
    torch.testing.assert_close(losses, expected, rtol=0, atol=ATOL)
    assert distance(pm.full_state_dict(), model.state_dict()) < ATOL
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert [name for name, each in pm.full_gradients().items() if each is not None] == trained
    assert {name for name, each in pm.named_parameters() if each in optimizer.state} == set(trained)


@pytest.mark.slow
def test_frozen_parameters_cost_no_communication_and_no_memory() -> None:
    model = adapted("dropout")
    pm = partitioned(model, "data")
    step = pm.simulate()
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    assert trained <= step.communication[0, 1] <= trained + 64  # and the loss
    assert step.memory[0].optimizer == 2 * trained
    assert step.memory[0].highest["gradients"][0] <= trained


@pytest.mark.slow
def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model, (tokens, _) = adapted("lora"), batch()
    pm = partitioned(model, "fsdp")
    train(pm)
    expected = pm.eval()(tokens)
    state = get_peft_model_state_dict(model, state_dict=pm.full_state_dict())
    assert all("lora_" in name or ".head." in name for name in state)
    model.save_pretrained(tmp_path, state_dict=pm.full_state_dict())
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(Net().double(), tmp_path)
    torch.testing.assert_close(loaded.eval()(tokens), expected, rtol=0, atol=ATOL)
    assert distance(get_peft_model_state_dict(loaded), state) == 0
    pm.load_state_dict(loaded.state_dict())
    model.load_state_dict(pm.full_state_dict())
    torch.testing.assert_close(model.merge_and_unload().eval()(tokens), expected, rtol=0, atol=ATOL)
    torch.testing.assert_close(pm(tokens), expected, rtol=0, atol=ATOL)  # its model was merged, it was not


@pytest.mark.slow
def test_the_state_of_adapters_alone() -> None:
    """Without layers that are trained whole, peft reads the state from the partitioned model itself."""
    model = adapted("dropout")
    pm = partitioned(model, "tensor")
    assert pm.peft_config is model.peft_config
    assert distance(get_peft_model_state_dict(pm), get_peft_model_state_dict(model)) == 0
    with pytest.raises(AttributeError, match=r"'merge_and_unload'.*is a method.*full_state_dict"):
        pm.merge_and_unload()
    with pytest.raises(AttributeError, match=r"'set_adapter'.*before partition"):
        pm.set_adapter("other")


@pytest.mark.slow
def test_adapters_are_switched_on_the_model() -> None:
    """Each adapter has a partitioned model of its own, which keeps it."""
    model, (tokens, _) = adapted("dropout"), batch()
    model.add_adapter("other", lora("down"))
    model.double().eval()
    pm, expected = partitioned(model, "data"), model(tokens)
    model.set_adapter("other")
    other, of_other = partitioned(model, "pipeline"), model(tokens)
    with model.disable_adapter():
        base, of_base = partitioned(copy.deepcopy(model), "pipeline"), model(tokens)
        with pytest.raises(ConfigError, match=r"_disable_adapters of .* was False"):
            other(tokens)
    for each, result in ((pm, expected), (other, of_other), (base, of_base)):
        torch.testing.assert_close(each(tokens), result, rtol=0, atol=ATOL)
    assert not torch.allclose(expected, of_other)
    trained = copy.deepcopy(model)
    trained.set_adapter("default")
    losses, _ = train(pm.train(), steps=1)  # traced now, while the other adapter is active
    assert losses == pytest.approx(train(trained.train(), steps=1)[0], abs=ATOL)
    assert distance(pm.full_state_dict(), trained.state_dict()) < ATOL


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["gate"]),
        pytest.param(IA3Config(target_modules=["gate"], feedforward_modules=[]), marks=pytest.mark.slow),
    ],
    ids=["lora", "ia3"],
)
def test_adapters_of_a_partitioned_model(config: Any) -> None:
    model, (tokens, _) = Net().double(), batch()
    pm = partitioned(model, "pipeline")
    with pytest.raises(ConfigError, match=r"gate cannot be set[\s\S]*remedy: .*get_peft_model"):
        get_peft_model(pm, config)
    torch.testing.assert_close(pm(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize("modes", [("pipeline", "fsdp"), ("data", "tensor")])
def test_processes(workers: Callable[[int], Workers], modes: tuple[str, ...]) -> None:
    assert workers(2).values(process_differences, "lora", modes, timeout=170) == [""] * 2


def language_model(config: Any) -> Any:
    """Return a small Llama with adapters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=32, **sizes)).double(), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=TaskType.CAUSAL_LM, init_lora_weights=False),
        PromptTuningConfig(num_virtual_tokens=2, task_type=TaskType.CAUSAL_LM),
    ],
    ids=["lora", "prompts"],
)
@pytest.mark.parametrize("mode", ["pipeline", "tensor"])
def test_language_models(config: Any, mode: str) -> None:
    """Their loss is computed in float32 inside."""
    model, tokens = language_model(config).train(), torch.randint(1, 32, (4, 8))
    pm = partition(model, 2, mode, example_kwargs={"input_ids": tokens, "labels": tokens}, progress=False)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(pm.train_step(input_ids=tokens, labels=tokens), loss, rtol=1e-6, atol=0)
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-7)
    assert (pm.device, pm.dtype, pm.config) == (torch.device("cpu"), torch.float64, model.config)


@pytest.mark.slow
def test_generation() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=TaskType.CAUSAL_LM, init_lora_weights=False)
    model, tokens = language_model(config).eval(), torch.randint(1, 32, (2, 5))
    pm: Any = partition(model, 2, "tensor", example_kwargs={"input_ids": tokens}, progress=False)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(pm.generate(input_ids=tokens, **options), model.generate(input_ids=tokens, **options))


@pytest.mark.slow
def test_generation_with_prompts() -> None:
    model = language_model(PromptTuningConfig(num_virtual_tokens=2, task_type=TaskType.CAUSAL_LM)).eval()
    tokens = torch.randint(1, 32, (2, 5))
    pm: Any = partition(model, 2, "tensor", example_kwargs={"input_ids": tokens}, progress=False)
    with pytest.raises(ConfigError, match="does not take the prompts that PROMPT_TUNING of peft"):
        pm.generate(input_ids=tokens, max_new_tokens=2)
