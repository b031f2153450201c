"""Causal language models of transformers of two layers, with weights large enough that greedy tokens vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 64

_GROUPED = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


def _gpt2(**options: Any) -> Any:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64, **options}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def _llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED, **options))


def _mistral(**options: Any) -> Any:
    """Return a model whose layers attend to six positions back."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_GROUPED, sliding_window=6, **options))


def _gpt_neo(**options: Any) -> Any:
    """Return a model with a layer that attends to all positions, and one to four back."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "window_size": 4}
    kinds = {"attention_types": [[["global", "local"], 1]], "attn_implementation": "eager"}
    return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, **kinds, **options))


_MODELS: dict[str, Callable[..., Any]] = {"gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "gpt_neo": _gpt_neo}


def causal_model(name: str, **options: Any) -> Any:
    """Return a model in evaluation mode, always with the same weights.

    Args:
        name: of its family.
        options: of its config.
    """
    model = _MODELS[name](**options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()
