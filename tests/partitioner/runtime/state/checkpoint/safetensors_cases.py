"""Models from the meta device that read safetensors files; some of it runs on every rank of worker processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.live_storages import LiveStorages, held
from partitioner import partition

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 512}
PROMPT = torch.arange(3, 27).view(4, 6)


class Rotated(nn.Module):
    """A fused projection of heads, a buffer and an attribute that the constructor alone computes, and statistics that a file has."""

    mask: Tensor

    def __init__(self, heads: int = 4, base: float = 100.0, *, is_causal: bool = True) -> None:
        super().__init__()
        self.heads, self.base = heads, base
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("frequencies", base ** (-torch.arange(0, 4) / 4), persistent=False)
        self.register_buffer("mask", torch.full((8, 8), float(is_causal) * -9.0).triu_(1), persistent=is_causal)
        self.scale = [torch.tensor([1.0, 0.5, 0.25, 2.0])]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 4)).unbind(-3)
        q = q * self.frequencies * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) * self.scale[0]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + self.mask[: x.shape[1], : x.shape[1]]
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        result: Tensor = self.norm(self.out(mixed).transpose(1, 2))
        return result


def llama(layers: int = 4) -> LlamaForCausalLM:
    """Return a model of transformers with its default cache, tied embeddings and grouped heads."""
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, tie_word_embeddings=True, max_position_embeddings=64, **SIZES)).eval()


def saved_in_parts(folder: Path, parts: int = 4) -> LlamaForCausalLM:
    """Save a model in so many files with an index, without the second name of tied weights; return it."""
    torch.manual_seed(0)
    model = llama()
    tensors = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    files = {f"model-{part + 1:05}-of-{parts:05}.safetensors": dict(tensors[part::parts]) for part in range(parts)}
    for file, content in files.items():
        save_file(content, folder / file)
    weight_map = {name: file for file, content in files.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model


def loaded(mode: Any, devices: int, folder: str) -> tuple[list[list[int]], int]:
    """Generate tokens with a model that every rank loads; return them, and the bytes held beyond this process's parameters."""
    before = held()
    with torch.device("meta"):
        model = llama()
    pm = partition(model, devices, mode, example_inputs=(PROMPT,), progress=False)
    planned = held() - before
    with LiveStorages() as counter:
        pm.load_safetensors(folder)
    part = sum(parameter.nbytes for parameter in pm.parameters())
    tokens: Tensor = pm.generate(PROMPT, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return tokens.tolist(), planned + counter.peaks[0] - part


def unlike_files(folder: str) -> None:
    """Load a file that has another shape on the second rank."""
    rank = int(os.environ["RANK"])
    path = Path(folder) / f"{rank}.safetensors"
    save_file({"weight": torch.zeros(4 + rank, 4), "bias": torch.zeros(4)}, path)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    partition(model, 2, "data", example_inputs=(torch.zeros(2, 4),), progress=False).load_safetensors(path)
