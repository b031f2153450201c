"""Ten models at their published widths with two layers, on the meta device, each with one batch of 2 x 4,096 tokens.

Models of transformers are built from their config classes with the numbers of the published checkpoints; nothing is downloaded.
"""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["LAYERS", "LENGTH", "MODELS", "ROWS", "FieldModel", "Sizes", "decoder", "of_transformers"]

LAYERS, ROWS, LENGTH = 2, 2, 4096


@dataclass(frozen=True)
class Sizes:
    """The sizes that the bytes of tensor parallelism depend on.

    Attributes:
        hidden: width of the residual stream.
        heads: of queries.
        key_heads: heads of keys and values.
        head: width of a head.
        ffn: inner width of the perceptron.
        vocab: rows of the embedding.
        length: tokens of a sample.
    """

    hidden: int
    heads: int
    key_heads: int
    head: int
    ffn: int
    vocab: int
    length: int = LENGTH


@dataclass(frozen=True)
class FieldModel:
    """One model.

    Attributes:
        make: builds it, on the default device.
        sizes: those of the formula.
        has_matrix_before_head: whether a matrix of the width of the model stands between the last layer and the head.
        n_kinds: rows of a table of kinds of tokens, beside a table of positions; 0: there are none.
    """

    name: str
    make: Callable[[], nn.Module]
    sizes: Sizes
    has_matrix_before_head: bool = False
    n_kinds: int = 0

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The keyword inputs of one call, on the default device."""
        tokens = torch.zeros(ROWS, self.sizes.length, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}


class GroupedLlama(nn.Module):
    """A Llama of 8B written by hand: ``unflatten`` for heads, ``enable_gqa`` for groups, rotary positions by a table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(GroupedBlock(sizes) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        angles = torch.outer(torch.arange(sizes.length), 5e5 ** (-torch.arange(0, sizes.head, 2) / sizes.head)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of the next token."""
        x = self.token(input_ids)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class GroupedBlock(nn.Module):
    """Attention with grouped queries and a gated perceptron."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.attention_norm, self.norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.query = nn.Linear(sizes.hidden, sizes.heads * sizes.head, bias=False)
        self.key, self.value = (nn.Linear(sizes.hidden, sizes.key_heads * sizes.head, bias=False) for _ in range(2))
        self.project = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Attention and a perceptron, each added to its input."""
        normed = self.attention_norm(x)
        query, key, value = (linear(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        query, key = (
            each * cosine + torch.cat((-each[..., self.head // 2 :], each[..., : self.head // 2]), -1) * sine for each in (query, key)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        normed = self.norm(x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return result


def of_transformers(family: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of transformers: ``("Llama", "ForCausalLM", hidden_size=4096, ...)``."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{family}Config")(**options)
        model: nn.Module = getattr(transformers, f"{family}{kind}")(config)
        return model

    return make


def decoder(name: str, family: str, sizes: Sizes, **options: Any) -> FieldModel:
    """Return a causal language model of transformers with rotary positions and grouped queries."""
    words = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "head_dim": sizes.head,
        "vocab_size": sizes.vocab,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": sizes.length,
        "use_cache": False,
        "attn_implementation": "sdpa",
        **options,
    }
    return FieldModel(name, of_transformers(family, "ForCausalLM", **words), sizes)


def _bert() -> FieldModel:
    sizes = Sizes(hidden=1024, heads=16, key_heads=16, head=64, ffn=4096, vocab=30522, length=512)
    words = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "vocab_size": 30522,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return FieldModel("BERT large", of_transformers("Bert", "ForMaskedLM", **words), sizes, has_matrix_before_head=True, n_kinds=2)


_LLAMA_8B = Sizes(hidden=4096, heads=32, key_heads=8, head=128, ffn=14336, vocab=128256)

MODELS = (
    decoder("Llama 3 8B", "Llama", _LLAMA_8B),
    decoder("Llama 3 70B", "Llama", Sizes(8192, 64, 8, 128, 28672, 128256)),
    decoder("Llama 3 405B", "Llama", Sizes(16384, 128, 8, 128, 53248, 128256)),
    decoder("Qwen2 7B", "Qwen2", Sizes(3584, 28, 4, 128, 18944, 152064)),
    decoder("Qwen3 8B", "Qwen3", Sizes(4096, 32, 8, 128, 12288, 151936)),
    decoder(
        "Gemma 2 9B",
        "Gemma2",
        Sizes(3584, 16, 8, 256, 14336, 256000),
        attn_implementation="eager",  # scores are capped, which transformers refuses in fused attention
        query_pre_attn_scalar=256,
        sliding_window=4096,
    ),
    _bert(),
    decoder("Phi-3 mini", "Phi3", Sizes(3072, 32, 32, 96, 8192, 32064), pad_token_id=0),
    decoder("Phi-4 mini", "Phi3", Sizes(3072, 24, 8, 128, 8192, 200064), pad_token_id=0, tie_word_embeddings=True),
    decoder("Mistral 7B", "Mistral", Sizes(4096, 32, 8, 128, 14336, 32768), sliding_window=None),
    FieldModel("Llama 8B by hand", lambda: GroupedLlama(_LLAMA_8B), _LLAMA_8B),
)
