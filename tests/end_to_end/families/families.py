"""Families of transformers' models, from their configurations: small, with four layers, so that four stages have one each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers

ROWS, LENGTH, WORDS, WIDTH, LAYERS, HEADS = 4, 12, 32, 16, 4, 2

DECODER = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 24}
GROUPED = {**DECODER, "num_key_value_heads": HEADS}
ROUTED = {**GROUPED, "num_experts_per_tok": 2}
BERT = {**DECODER, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": WORDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 16,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
FALCON = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
BLOOM = {"vocab_size": WORDS, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
OPT = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "ffn_dim": 24, "dropout": 0.0,
    "max_position_embeddings": 16, "word_embed_proj_dim": WIDTH,
}  # fmt: skip
T5 = {
    "vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": LAYERS // 2, "num_decoder_layers": LAYERS // 2,
    "num_heads": HEADS, "dropout_rate": 0.0,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": LAYERS // 2, "decoder_layers": LAYERS // 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0, "max_position_embeddings": 16,
}  # fmt: skip
VIT = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 24, "image_size": 16,
    "patch_size": 4, "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

Precision = Literal["double", "inside", "single"]
"""In what a model computes that is in float64: in that; partly in float32 (normalisations, rotations of positions, scores), as its code
says; or not at all, since torch has no grouped products of doubles."""


@dataclass(frozen=True)
class Family:
    """A model, and what it is fed.

    Attributes:
        kind: the class of the model.
        config: the class of its configuration.
        sizes: the arguments of the configuration.
        precision: see there.
        inputs: ``"tokens"``, ``"pairs"`` (of an encoder and a decoder) or ``"images"``.
    """

    kind: str
    config: str
    sizes: Mapping[str, Any]
    precision: Precision = "double"
    inputs: Literal["tokens", "pairs", "images"] = "tokens"

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return torch.float32 if self.precision == "single" else torch.float64

    @property
    def tolerance(self) -> float:
        """The largest error, relative to the largest of the numbers that are compared."""
        return 1e-9 if self.precision == "double" else 1e-5

    def model(self) -> Any:
        """Build the model with weights far from zero: at zero, routers and gates make no difference."""
        config = getattr(transformers, self.config)(**self.sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = getattr(transformers, self.kind)(config).to(self.dtype)
            for parameter in model.parameters():
                parameter.data = torch.randn_like(parameter) * 0.2
        model.config.use_cache = False
        return model

    def batch(self, seed: int) -> tuple[dict[str, Any], torch.Tensor]:
        """Draw inputs and targets."""
        generator = torch.Generator().manual_seed(seed)
        tokens, target = (torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))
        if self.inputs == "images":
            images = torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64).to(self.dtype)
            return {"pixel_values": images}, target[:, 0] % 3
        return {"input_ids": tokens} | ({"decoder_input_ids": target.flip(1)} if self.inputs == "pairs" else {}), target


def _decoder(name: str, sizes: Mapping[str, Any] = GROUPED, precision: Precision = "inside", **more: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", {**sizes, **more}, precision)


FAMILIES: Mapping[str, Family] = {
    "mixtral": _decoder("Mixtral", ROUTED, "single", num_local_experts=4),
    "qwen2_moe": _decoder("Qwen2Moe", ROUTED, "single", num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24),
    "qwen3_moe": _decoder("Qwen3Moe", ROUTED, "single", num_experts=4, moe_intermediate_size=24, head_dim=8),
    "deepseek_v3": _decoder(
        "DeepseekV3", ROUTED, "single", n_routed_experts=4, moe_intermediate_size=24, n_group=2, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
    "gpt_oss": _decoder(
        "GptOss", ROUTED, "single", num_local_experts=4, head_dim=8, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=4),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma2": _decoder("Gemma2", head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    "gemma3": Family(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}, "inside"
    ),
    "phi": _decoder("Phi"),
    "phi3": _decoder("Phi3"),
    "olmo2": _decoder("Olmo2"),
    "cohere": _decoder("Cohere"),
    "granite": _decoder("Granite"),
    "starcoder2": _decoder("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    "stablelm": _decoder("StableLm"),
    "gpt_neox": _decoder("GPTNeoX", DECODER, max_position_embeddings=16),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4}, "inside"),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", GPT2),
    "falcon": Family("FalconForCausalLM", "FalconConfig", FALCON, "inside"),
    "bloom": Family("BloomForCausalLM", "BloomConfig", BLOOM, "inside"),
    "opt": Family("OPTForCausalLM", "OPTConfig", OPT),
    "bert": Family("BertForMaskedLM", "BertConfig", BERT),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", {**BERT, "max_position_embeddings": 20}),
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5, "inside", "pairs"),
    "bart": Family("BartForConditionalGeneration", "BartConfig", BART, "double", "pairs"),
    "vit": Family("ViTForImageClassification", "ViTConfig", VIT, "double", "images"),
}  # fmt: skip
"""Five mixtures of experts, and others."""
