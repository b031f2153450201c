"""``pm.generate`` gives the tokens of ``model.generate``, each rank with the keys and values of its own heads, layers and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, Constraints, PartitionedModel, partition
from partitioner.model.generation.decoder import Decoder, Decoding
from partitioner.model.generation.static_cache_check import check_static_cache
from tests.support.models.language import causal_model

PROMPT = (torch.zeros(4, 8, dtype=torch.long),)
pytestmark = pytest.mark.timeout(600)  # each partition lowers programs of several sizes

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
SPLIT = {"gpt2": "transformer.h.1", "llama": "model.layers.1", "mistral": "model.layers.1"}


def prompt(rows: int, tokens: int, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens, and a mask that leaves out the first ``padding`` tokens of the second row."""
    ids = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1:2, :padding], mask[1:2, :padding] = 0, 0
    return ids, mask


def partitioned(name: str, mode: Any, devices: int) -> tuple[Any, PartitionedModel]:
    model = causal_model(name)
    has_stages = mode == "pipeline" or "pipeline" in mode
    constraints = Constraints(split_spec={SPLIT[name]: "beginning"}) if has_stages else None
    return model, partition(model, devices, mode, example_inputs=PROMPT, constraints=constraints)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Decoding]:
    """Return the caches of all calls of ``generate`` in a test."""
    made: list[Decoding] = []
    begin = Decoder.begin

    def recorded(self: Decoder, length: int) -> Decoding:
        made.append(begin(self, length))
        return made[-1]

    monkeypatch.setattr(Decoder, "begin", recorded)
    return made


def shapes(cache: Decoding) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the parts of keys and values that each rank has."""
    return [[tuple(tensor.shape) for tensor in tensors.values()] for _, tensors in sorted(cache.caches.items())]


@pytest.mark.slow
def test_tensor_parallel_stages_keep_their_heads_and_layers(caches: list[Decoding]) -> None:
    """Prompts of two lengths, with padding in front, and other batch sizes, are served by one partition."""
    model, pm = partitioned("gpt2", {"pipeline": 2, "tensor": 2}, 4)
    for rows, tokens, padding, new in ((2, 5, 2, 32), (3, 8, 3, 4)):
        ids, mask = prompt(rows, tokens, padding)
        arguments = {"attention_mask": mask, "max_new_tokens": new, **GREEDY}
        assert torch.equal(pm.generate(ids, **arguments), model.generate(ids, **arguments))
    assert shapes(caches[0]) == [[(2, 2, 64, 8)] * 2] * 4  # half of the heads, keys and values of one of two layers


@pytest.mark.slow
def test_grouped_queries_sampling_beams_and_the_end_of_a_text(caches: list[Decoding]) -> None:
    model, pm = partitioned("llama", {"tensor": 2}, 2)
    ids, _ = prompt(2, 9)
    greedy = model.generate(ids, max_new_tokens=6, **GREEDY)
    for arguments in (
        {"max_new_tokens": 32},
        {"max_new_tokens": 12, "eos_token_id": int(greedy[0, -1])},
        {"max_new_tokens": 6, "num_beams": 2},
        {"max_new_tokens": 6, "do_sample": True, "top_k": 5},
        {"max_length": 14},
        {"max_new_tokens": 4, "prefill_chunk_size": 16},
    ):
        torch.manual_seed(0)
        expected = model.generate(ids, **{**GREEDY, **arguments})
        torch.manual_seed(0)
        assert torch.equal(pm.generate(ids, **{**GREEDY, **arguments}), expected), arguments
    assert shapes(caches[0]) == [[(2, 1, 64, 8)] * 4] * 2


@pytest.mark.slow
def test_a_prompt_in_chunks() -> None:
    model = causal_model("llama")
    pm = partition(model, 2, "tensor", example_inputs=PROMPT)
    ids, _ = prompt(2, 9)
    arguments = {"max_new_tokens": 4, "prefill_chunk_size": 4, **GREEDY}
    assert torch.equal(pm.generate(ids, **arguments), model.generate(ids, **arguments))


def test_a_mask_by_the_number_of_keys_is_refused() -> None:
    """GPT-Neo takes the last rows of a table; a cache of fixed length has as many keys as places."""
    with pytest.raises(ConfigError, match="GPTNeoForCausalLM computes other logits with a cache of 64 positions"):
        check_static_cache(causal_model("gpt_neo"), 64, None)


@pytest.mark.slow
def test_generate_refuses_a_mask_by_the_number_of_keys() -> None:
    model = causal_model("gpt_neo")
    pm = partition(model, 2, "tensor", example_inputs=PROMPT)
    with pytest.raises(ConfigError, match="GPTNeoForCausalLM computes other logits with a cache of 64 positions"):
        pm.generate(prompt(2, 9)[0], max_new_tokens=4, **GREEDY)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_caches_of_fixed_length_are_as_good_as_the_models_own(name: str, dtype: torch.dtype) -> None:
    model = causal_model(name).to(dtype)
    for length in (8, 64):
        check_static_cache(model, length, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize(
    ("devices", "mode"),
    [
        (2, "pipeline"),
        (2, "tensor"),
        (4, {"pipeline": 2, "tensor": 2}),
        (2, "data"),
        (2, "fsdp"),
        (2, "sequence"),
        (4, {"data": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_every_mode(name: str, devices: int, mode: Any) -> None:
    model, pm = partitioned(name, mode, devices)
    ids, mask = prompt(4, 9, 2)
    arguments = {"attention_mask": mask, "max_new_tokens": 32, **GREEDY}
    assert torch.equal(pm.generate(ids, **arguments), model.generate(ids, **arguments))


@pytest.mark.slow
def test_generation_reads_the_present_weights_and_ends_where_the_positions_do() -> None:
    model = causal_model("gpt2", n_positions=45)
    pm = partition(model, 2, "tensor", example_inputs=PROMPT)
    ids, _ = prompt(2, 40)
    assert torch.equal(pm.generate(ids, max_new_tokens=5, **GREEDY), model.generate(ids, max_new_tokens=5, **GREEDY))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    pm.load_state_dict(model.state_dict())
    assert torch.equal(pm.generate(ids, max_new_tokens=5, **GREEDY), model.generate(ids, max_new_tokens=5, **GREEDY))
    with pytest.raises(ConfigError, match="the cache would be full: 40 tokens and 6 new ones are 46, and the model has 45 positions"):
        pm.generate(ids, max_new_tokens=6, **GREEDY)


def test_what_generate_does_not_take_is_refused_by_name() -> None:
    pm = partition(causal_model("gpt2"), 2, "tensor", example_inputs=PROMPT)
    ids, _ = prompt(2, 5)
    for arguments, name in (
        ({"past_key_values": object()}, "past_key_values"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "offloaded"}, "cache_implementation"),
        ({"output_attentions": True}, "output_attentions"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_token": 4}, "max_new_token"),
    ):
        with pytest.raises(ConfigError, match=name):
            pm.generate(ids, **{**GREEDY, "max_new_tokens": 4, **arguments})
    for wrong in (None, ids[0], ids.float(), [[1, 2]]):
        with pytest.raises(ConfigError, match="input_ids"):
            pm.generate(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_other_models_have_no_generate() -> None:
    pm = partition(nn.Linear(4, 4).eval(), 1, "model")
    with pytest.raises(AttributeError, match="Linear has no generate"):
        pm.generate(torch.zeros(1, 1, dtype=torch.long))
    training = partition(causal_model("gpt2").train(), 2, "data", example_inputs=PROMPT)
    with pytest.raises(ConfigError, match="evaluation mode"):
        training.generate(torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.slow
def test_a_model_that_trained_generates_in_evaluation_mode() -> None:
    model, pm = partitioned("gpt2", "tensor", 2)
    pm.train()
    ids, _ = prompt(2, 9)
    pm.train_step(input_ids=ids, target=ids, loss_fn=lambda output, _: output.logits.square().mean())
    torch.optim.SGD(pm.parameters(), lr=0.1).step()
    model.load_state_dict(pm.full_state_dict())
    pm.eval()
    assert torch.equal(pm.generate(ids, max_new_tokens=8, **GREEDY), model.generate(ids, max_new_tokens=8, **GREEDY))
