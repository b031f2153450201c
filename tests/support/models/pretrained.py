"""Architectures of the transformers library, built small from their configurations; nothing is downloaded."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
import transformers
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, classes, flags, real

VOCABULARY = 29
LENGTH = 6
LABELS = 4
FLOAT32_INSIDE = 1e-6
"""Relative error of a model that computes its loss or its norms in float32 whatever the dtype of its parameters."""


def gpt2(*, use_cache: bool = False) -> nn.Module:
    """Return a decoder whose embedding is the output projection."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=2, n_head=3, use_cache=use_cache,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def gpt2_with_cache() -> nn.Module:
    """Return a model that returns its keys and values: a cache object among the outputs, from every depth."""
    return gpt2(use_cache=True)


def llama() -> nn.Module:
    """Rotary positions and grouped queries: four heads over two key-value heads."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    """Return an encoder, a masked language model with a tied embedding."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    """Encoder-decoder; one embedding serves both sides and the output projection."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=12, d_kv=4, d_ff=24, num_layers=1, num_heads=3, relative_attention_num_buckets=8,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """Image patches through an encoder."""
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24, image_size=12, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=LABELS,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    """Residual convolutions with batch normalisation."""
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[6, 10], depths=[2, 1], layer_type="basic", num_labels=LABELS,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config)


def convnext() -> nn.Module:
    """Depthwise convolutions, and normalisation over the channels alone."""
    config = transformers.ConvNextConfig(
        patch_size=2, hidden_sizes=[6, 10], depths=[1, 1], num_stages=2, layer_scale_init_value=0.5, num_labels=LABELS,
    )  # fmt: skip
    return transformers.ConvNextForImageClassification(config)


def swin() -> nn.Module:
    """Attention inside windows, shifted in every other layer, and patches merged by four."""
    config = transformers.SwinConfig(
        image_size=12, patch_size=3, embed_dim=6, depths=[2, 1], num_heads=[3, 2], window_size=2, mlp_ratio=2.0, num_labels=LABELS,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    return transformers.SwinForImageClassification(config)


def whisper() -> nn.Module:
    """Sound through convolutions and an encoder; a decoder with a tied embedding."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=4, d_model=12, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=7, max_target_positions=16, dropout=0.0,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _tokens(generator: Generator, batch_size: int) -> Tensor:
    return classes(generator, VOCABULARY, batch_size, LENGTH)


def _language(generator: Generator, batch_size: int) -> Inputs:
    tokens = _tokens(generator, batch_size)
    return (tokens,), {"labels": tokens}


def _padding(generator: Generator, batch_size: int) -> Tensor:
    """Return a mask of ones where a token is real: a prefix of each row, of one token at least."""
    lengths = 1 + classes(generator, LENGTH, batch_size)
    return (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()


def _masked_language(generator: Generator, batch_size: int) -> Inputs:
    """Few labels, and the more of them the later the row: a mean over rows would be wrong."""
    tokens = _tokens(generator, batch_size)
    masked = flags(generator, batch_size, LENGTH) & (torch.arange(LENGTH) <= torch.arange(batch_size).unsqueeze(1))
    masked[:, 0] = True
    labels = torch.where(masked, tokens, -100)
    return (), {"input_ids": tokens, "attention_mask": _padding(generator, batch_size), "labels": labels}


def _translation(generator: Generator, batch_size: int) -> Inputs:
    source = _tokens(generator, batch_size)
    labels = classes(generator, VOCABULARY, batch_size, 5)
    return (), {"input_ids": source, "attention_mask": _padding(generator, batch_size), "labels": labels}


def _images(generator: Generator, batch_size: int) -> Inputs:
    return (), {"pixel_values": real(generator, batch_size, 3, 12, 12), "labels": classes(generator, LABELS, batch_size)}


def _transcribed_sounds(generator: Generator, batch_size: int) -> Inputs:
    return (), {"input_features": real(generator, batch_size, 4, 14), "labels": classes(generator, VOCABULARY, batch_size, 5)}


CASES = (
    Case("gpt2", gpt2, _language, tolerance=FLOAT32_INSIDE),
    Case("gpt2_with_cache", gpt2_with_cache, _language, tolerance=FLOAT32_INSIDE),
    Case("llama", llama, _language, tolerance=FLOAT32_INSIDE),
    Case("bert", bert, _masked_language, uneven_loss=True),
    Case("t5", t5, _translation, tolerance=FLOAT32_INSIDE),
    Case("vit", vit, _images),
    Case("resnet", resnet, _images, batch_norm=True),
    Case("convnext", convnext, _images),
    Case("swin", swin, _images),
    Case("whisper", whisper, _transcribed_sounds, tolerance=FLOAT32_INSIDE),
)
