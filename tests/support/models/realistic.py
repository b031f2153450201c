"""Models of widths at which predicted times say something, on the meta device: to be planned, not to be run."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.support.models.attention.experts import LENGTH as EXPERT_TOKENS
from tests.support.models.attention.experts import WIDTH as EXPERT_WIDTH
from tests.support.models.attention.experts import Mixture
from tests.support.models.attention.gpt import LENGTH, Gpt
from tests.support.models.vision.unet import UNet

_SIZES = {"num_hidden_layers": 2, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def _tokens(rows: int = 8, length: int = 128) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def gpt2(**config: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return GPT-2, whose ``Conv1D`` flattens the rows before every product; it returns its cache."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, **config)), (_tokens(),)


def opt(**config: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return OPT, which flattens the rows before its feed-forward layers."""
    return transformers.OPTForCausalLM(transformers.OPTConfig(num_hidden_layers=2, **config)), (_tokens(),)


def _llama() -> tuple[nn.Module, tuple[Any, ...]]:
    config = transformers.LlamaConfig(**{**_SIZES, "num_key_value_heads": 4, "vocab_size": 32000, "use_cache": False})
    return transformers.LlamaForCausalLM(config), (_tokens(),)


def _bert() -> tuple[nn.Module, tuple[Any, ...]]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES)), (_tokens(),)


def _t5() -> tuple[nn.Module, tuple[Any, ...]]:
    config = transformers.T5Config(num_layers=2, use_cache=False, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), (_tokens(), torch.ones(8, 128, dtype=torch.long), _tokens(8, 32))


def _vit() -> tuple[nn.Module, tuple[Any, ...]]:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_SIZES)), (torch.zeros(8, 3, 224, 224),)


def _whisper() -> tuple[nn.Module, tuple[Any, ...]]:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
    config = transformers.WhisperConfig(**sizes, use_cache=False, max_source_positions=200)
    return transformers.WhisperForConditionalGeneration(config), (torch.zeros(8, 80, 400), None, _tokens(8, 32))


def _resnet() -> tuple[nn.Module, tuple[Any, ...]]:
    config = transformers.ResNetConfig(depths=[1, 1, 1, 1], hidden_sizes=[64, 128, 256, 512], layer_type="basic")
    return transformers.ResNetForImageClassification(config), (torch.zeros(16, 3, 112, 112),)


def _convnext() -> tuple[nn.Module, tuple[Any, ...]]:
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(depths=[1, 1, 1, 1])), (torch.zeros(8, 3, 112, 112),)


class _Transformer(nn.Module):
    """``nn.Transformer`` between two embeddings and a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(8000, 512), nn.Embedding(8000, 512)
        self.transformer = nn.Transformer(512, 8, 1, 1, 2048, batch_first=True)
        self.head = nn.Linear(512, 8000)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(self.source(source), self.target(target)))


def _alexnet() -> tuple[nn.Module, tuple[Any, ...]]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2), nn.Conv2d(192, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(6), nn.Flatten()]
    layers += [nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers), (torch.zeros(32, 3, 224, 224),)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.layers, self.head = nn.Embedding(4000, 256), nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 4000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.token(tokens))[0])


class _Tables(nn.Module):
    """A recommendation model: large tables, a small perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(200_000, 64), nn.Embedding(50_000, 64)
        self.layers = _perceptron(128, 512, 256, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.layers(torch.cat((self.user(user), self.item(item)), dim=-1))


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _convolutions(depth: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


REALISTIC: Mapping[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "GPT-2": gpt2,
    "OPT": opt,
    "Llama": _llama,
    "BERT": _bert,
    "T5": _t5,
    "ViT": _vit,
    "Whisper": _whisper,
    "ResNet": _resnet,
    "ConvNeXt": _convnext,
    "nn.Transformer": lambda: (_Transformer(), (_tokens(8, 64), _tokens(8, 64))),
    "small GPT": lambda: (Gpt(), (_tokens(8, LENGTH),)),
    "wide GPT": lambda: (Gpt(width=1024, heads=16, depth=2), (_tokens(64, LENGTH),)),
    "perceptron": lambda: (_perceptron(64, 256, 256, 10), (torch.zeros(64, 64),)),
    "wide perceptron": lambda: (_perceptron(1024, 4096, 1024, 4096, 1024), (torch.zeros(256, 1024),)),
    "narrowing perceptron": lambda: (_perceptron(4096, 2048, 512, 128, 16), (torch.zeros(32, 4096),)),
    "convolutions": lambda: (_convolutions(4, 64), (torch.zeros(16, 3, 64, 64),)),
    "thin convolutions": lambda: (_convolutions(6, 8), (torch.zeros(4, 3, 96, 96),)),
    "AlexNet": _alexnet,
    "U-Net": lambda: (UNet(width=32), (torch.zeros(8, 1, 12, 12),)),
    "LSTM": lambda: (_Recurrent(), (_tokens(16, 32),)),
    "tables": lambda: (_Tables(), (torch.zeros(512, dtype=torch.long), torch.zeros(512, dtype=torch.long))),
    "experts": lambda: (Mixture(8, 64), (torch.zeros(32, EXPERT_TOKENS, EXPERT_WIDTH),)),
}
"""Name -> a model and its inputs, to be built within ``torch.device("meta")``."""
