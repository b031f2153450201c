"""The cases: a model, a batch, a cluster, and the meshes that people would type for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.field.memory import UNet
from benchmarks.field.models import Sizes, decoder, of_transformers

Mesh = Mapping[str, int]

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One question to ``mode="auto"``.

    Attributes:
        name: of the model, with its batch.
        make: returns the model, its arguments and keyword arguments, on the default device.
        cluster: as text; all its devices are used.
        meshes: typed by hand.
        options: other keywords of ``partition``.
        limit: seconds of the search.
    """

    name: str
    make: Callable[[], Made]
    cluster: str
    meshes: tuple[Mesh, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: {"precision": "bf16-mixed"})
    limit: float = 120.0

    @property
    def n_devices(self) -> int:
        """The number of devices of the cluster."""
        nodes, per_node = self.cluster.rpartition(":")[2].split("x")
        return int(nodes) * int(per_node)

    def on_meta(self) -> Made:
        """Return the model and its inputs on the meta device."""
        with torch.device("meta"):
            return self.make()


def _tokens(make: Callable[[], nn.Module], rows: int, length: int) -> Callable[[], Made]:
    """Return a function that builds a causal language model, with a batch of tokens that are their own labels."""

    def made() -> Made:
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        return make(), (), {"input_ids": tokens, "labels": tokens}

    return made


def _llama(sizes: Sizes, layers: int) -> Callable[[], nn.Module]:
    """Return a function that builds a Llama of transformers."""
    return decoder("Llama", "Llama", sizes, num_hidden_layers=layers, max_position_embeddings=131072).make


def _vit() -> Made:
    sizes = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16, "patch_size": 14}
    model = of_transformers("ViT", "ForImageClassification", **sizes, num_labels=1000)()
    return model, (), {"pixel_values": torch.zeros(1024, 3, 224, 224), "labels": torch.zeros(1024, dtype=torch.int64)}


def _clip() -> Made:
    rows = 2048
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    image = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}
    model = of_transformers("CLIP", "Model", text_config=text, vision_config=image, projection_dim=768)()
    tokens = torch.zeros(rows, 77, dtype=torch.int64)
    return model, (), {"input_ids": tokens, "pixel_values": torch.zeros(rows, 3, 224, 224), "return_loss": True}


def _unet() -> Made:
    return UNet(64), (torch.zeros(32, 3, 512, 512),), {}


_7B = _llama(Sizes(4096, 32, 32, 128, 11008, 32000), 32)
_8B = _llama(Sizes(4096, 32, 8, 128, 14336, 128256), 32)
_70B = _llama(Sizes(8192, 64, 8, 128, 28672, 128256), 80)
_405B = _llama(Sizes(16384, 128, 8, 128, 53248, 128256), 126)
_MIXTRAL = decoder(
    "Mixtral", "Mixtral", Sizes(4096, 32, 8, 128, 14336, 32000), num_hidden_layers=32, num_local_experts=8, num_experts_per_tok=2
).make

_ONE_NODE: tuple[Mesh, ...] = (
    {"data": 8},
    {"fsdp": 8},
    {"zero1": 8},
    {"tensor": 8},
    {"pipeline": 8},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"pipeline": 2, "fsdp": 4},
    {"pipeline": 2, "tensor": 4},
    {"pipeline": 4, "data": 2},
)
"""Of eight devices."""

_TWO_NODES: tuple[Mesh, ...] = (
    {"fsdp": 16},
    {"zero1": 16},
    {"data": 2, "fsdp": 8},
    {"data": 2, "tensor": 8},
    {"fsdp": 4, "tensor": 4},
    {"pipeline": 2, "fsdp": 8},
    {"pipeline": 2, "tensor": 8},
    {"pipeline": 2, "data": 4, "tensor": 2},
    {"pipeline": 4, "data": 4},
    {"pipeline": 16},
)
"""Of two nodes of eight."""

_FOUR_NODES: tuple[Mesh, ...] = (
    {"fsdp": 32},
    {"data": 4, "fsdp": 8},
    {"fsdp": 4, "tensor": 8},
    {"zero1": 4, "tensor": 8},
    {"data": 4, "tensor": 8},
    {"fsdp": 8, "tensor": 4},
    {"pipeline": 4, "fsdp": 8},
    {"pipeline": 4, "tensor": 8},
    {"pipeline": 4, "zero1": 2, "tensor": 4},
    {"pipeline": 8, "tensor": 4},
)
"""Of four nodes of eight."""

_EIGHT_NODES: tuple[Mesh, ...] = (
    {"fsdp": 64},
    {"data": 2, "fsdp": 32},
    {"fsdp": 8, "tensor": 8},
    {"zero1": 8, "tensor": 8},
    {"pipeline": 8, "tensor": 8},
    {"pipeline": 4, "data": 2, "tensor": 8},
    {"pipeline": 4, "data": 4, "tensor": 4},
    {"pipeline": 8, "fsdp": 8},
    {"pipeline": 16, "tensor": 4},
    {"pipeline": 2, "zero1": 4, "tensor": 8},
)
"""Of eight nodes of eight."""

_32_NODES: tuple[Mesh, ...] = (
    {"fsdp": 256},
    {"data": 4, "fsdp": 64},
    {"fsdp": 32, "tensor": 8},
    {"fsdp": 64, "tensor": 4},
    {"pipeline": 4, "zero1": 8, "tensor": 8},
    {"pipeline": 8, "zero1": 4, "tensor": 8},
    {"pipeline": 8, "zero1": 8, "tensor": 4},
    {"pipeline": 16, "zero1": 2, "tensor": 8},
    {"pipeline": 4, "fsdp": 64},
)
"""Of 32 nodes of eight."""

_512_NODES: tuple[Mesh, ...] = (
    {"fsdp": 512, "tensor": 8},
    {"pipeline": 4, "fsdp": 128, "tensor": 8},
    {"pipeline": 8, "zero1": 64, "tensor": 8},
    {"pipeline": 16, "zero1": 32, "tensor": 8},
    {"pipeline": 16, "data": 32, "tensor": 8},
    {"pipeline": 32, "zero1": 16, "tensor": 8},
    {"pipeline": 16, "zero1": 64, "tensor": 4},
    {"pipeline": 8, "fsdp": 64, "tensor": 8},
)
"""Of 512 nodes of eight."""

_LONG: tuple[Mesh, ...] = (
    {"tensor": 16},
    {"sequence": 2, "tensor": 8},
    {"sequence": 4, "tensor": 4},
    {"fsdp": 2, "tensor": 8},
    {"zero1": 2, "tensor": 8},
    {"fsdp": 2, "sequence": 8},
    {"fsdp": 2, "sequence": 4, "tensor": 2},
    {"pipeline": 2, "tensor": 8},
    {"pipeline": 2, "sequence": 8},
    {"pipeline": 4, "tensor": 4},
)
"""Of two nodes of eight, for few long rows."""

_CONVOLUTIONS: tuple[Mesh, ...] = (
    {"data": 8},
    {"fsdp": 8},
    {"zero1": 8},
    {"data": 4, "tile": 2},
    {"data": 2, "tile": 4},
    {"tile": 8},
    {"data": 4, "tensor": 2},
    {"pipeline": 8},
    {"pipeline": 2, "data": 4},
)
"""Of eight devices, for images."""

CASES = (
    Case("Llama 2 7B, 32 x 2,048", _tokens(_7B, 32, 2048), "h100:1x8", _ONE_NODE),
    Case("Llama 2 7B, 32 x 2,048", _tokens(_7B, 32, 2048), "h100:2x8", _TWO_NODES),
    Case("Llama 3 8B, 16 x 8,192", _tokens(_8B, 16, 8192), "h100:2x8", _TWO_NODES),
    Case("Llama 3 8B, float32, 16 x 2,048", _tokens(_8B, 16, 2048), "a100-80gb:2x8", _TWO_NODES, {"precision": "32-true"}),
    Case("Llama 3 8B, 8 x 4,096, 40 GB", _tokens(_8B, 8, 4096), "a100-40gb:1x8", _ONE_NODE),
    Case("Llama 3 8B, 2 x 131,072", _tokens(_8B, 2, 131072), "h100:2x8", _LONG),
    Case("Llama 3 70B, 16 x 2,048", _tokens(_70B, 16, 2048), "h100:8x8", _EIGHT_NODES),
    Case("Llama 3 70B, 512 x 4,096", _tokens(_70B, 512, 4096), "h100:32x8", _32_NODES, limit=300.0),
    Case("Llama 3.1 405B, 2,048 x 8,192", _tokens(_405B, 2048, 8192), "h100:512x8", _512_NODES, limit=600.0),
    Case("Mixtral 8x7B, 64 x 4,096", _tokens(_MIXTRAL, 64, 4096), "h100:4x8", _FOUR_NODES),
    Case("ViT-H/14, 1,024 images", _vit, "h100:1x8", _ONE_NODE),
    Case("CLIP ViT-L/14, 2,048 pairs", _clip, "h100:2x8", _TWO_NODES),
    Case("U-Net, float32, 32 images of 512 x 512", _unet, "a100-40gb:1x8", _CONVOLUTIONS, {"precision": "32-true"}),
)
