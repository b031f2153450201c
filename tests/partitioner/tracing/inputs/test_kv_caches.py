"""Caches of transformers are nested tensors, also where layers cache the state of a convolution or of linear attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from partitioner import TraceError, partition
from partitioner.model.generation.cached_forward import cache_name, cached_tensors
from partitioner.tracing.inputs.kv_caches import register_caches


def hybrid() -> Any:
    """Return a small model with a convolution in the first layer and attention in the second."""
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
        layer_types=["conv", "full_attention"],
        block_multiple_of=16,
    )
    return transformers.Lfm2ForCausalLM(config).eval()


def tokens(count: int) -> Tensor:
    return torch.randint(0, 64, (2, count), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def test_a_rebuilt_cache_continues_a_text() -> None:
    model, name = hybrid(), cache_name()
    register_caches()
    cache = model(input_ids=tokens(8))[name]
    leaves, tree = tree_flatten(cache)
    rebuilt = tree_unflatten(leaves, tree)
    assert len(leaves) == 4  # the convolution's state, None for its recurrent state, keys and values
    assert tree_flatten(rebuilt)[1] == tree
    for layer, other in zip(cache.layers, rebuilt.layers, strict=True):
        assert type(layer) is type(other)
        assert vars(layer).keys() <= vars(other).keys()
    expected = model(input_ids=tokens(1), **{name: copy.deepcopy(cache)}).logits
    torch.testing.assert_close(model(input_ids=tokens(1), **{name: rebuilt}).logits, expected, rtol=0, atol=0)


@pytest.mark.slow
@torch.no_grad()
def test_a_partitioned_model_returns_and_takes_the_state_of_convolutions() -> None:
    model, name = hybrid(), cache_name()
    pm = partition(model, 2, "tensor", example_kwargs={"input_ids": tokens(8)})
    expected, result = model(input_ids=tokens(8)), pm(input_ids=tokens(8))
    torch.testing.assert_close(result.logits, expected.logits)
    expected = model(input_ids=tokens(1), **{name: expected[name]})
    torch.testing.assert_close(pm(input_ids=tokens(1), **{name: result[name]}).logits, expected.logits)


def test_generate_refuses_the_state_of_convolutions() -> None:
    with pytest.raises(TraceError, match="Lfm2ForCausalLM caches the state of a convolution or of linear attention"):
        cached_tensors(hybrid(), None)
