"""Planned beside simulated steps and memory: models, meshes, precisions and recomputation, on 8 to 4,096 devices.

    python -m benchmarks.agreement                                  # some hours of a processor
    python -m benchmarks.agreement --models Llama BERT --sample 40  # 40 of their settings, evenly

time     step time of the plan relative to that of the simulation of its programs, in percent
memory   the largest peak of a device, alike

The search compares plans by the first; a plan that is chosen is shown with the second.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.field.memory import UNet
from benchmarks.field.models import Sizes, decoder, of_transformers
from benchmarks.rounds import table
from partitioner import PartitionWarning, partition
from passes.ir.errors import InfeasiblePlanError

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

LAYERS, LENGTH = 8, 4096


@dataclass(frozen=True)
class Setting:
    """A model, with rows for so many devices, on a mesh.

    Attributes:
        model: its name in ``MODELS``.
        mesh: of H100s, eight to a node.
        precision: and ``recompute``: of ``partition``.
    """

    model: str
    mesh: Mapping[str, int]
    precision: str
    recompute: str

    @property
    def n_devices(self) -> int:
        """The size of the mesh."""
        return math.prod(self.mesh.values())


def _text(make: Callable[[], nn.Module], length: int = LENGTH) -> Callable[[int], Made]:
    """Return a function that builds a language model with rows of tokens, which are their own labels."""

    def made(rows: int) -> Made:
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        return make(), (), {"input_ids": tokens, "labels": tokens}

    return made


def _decoder(family: str, sizes: Sizes, **options: Any) -> Callable[[int], Made]:
    return _text(decoder(family, family, sizes, num_hidden_layers=LAYERS, **options).make)


def _images(make: Callable[[], nn.Module], size: int = 224) -> Callable[[int], Made]:
    return lambda rows: (make(), (), {"pixel_values": torch.zeros(rows, 3, size, size), "labels": torch.zeros(rows, dtype=torch.int64)})


def _unet(rows: int) -> Made:
    return UNet(64), (torch.zeros(rows, 3, 256, 256),), {}


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": LAYERS}
_VIT = {**_BERT, "patch_size": 14, "num_labels": 1000}
_GPT2 = {"n_embd": 1600, "n_head": 25, "n_layer": LAYERS, "n_positions": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: Mapping[str, Callable[[int], Made]] = {
    "Llama 3 8B": _decoder("Llama", Sizes(4096, 32, 8, 128, 14336, 128256)),
    "Llama 3 70B": _decoder("Llama", Sizes(8192, 64, 8, 128, 28672, 128256)),
    "Qwen2 7B": _decoder("Qwen2", Sizes(3584, 28, 4, 128, 18944, 152064)),
    "Gemma 2 9B": _decoder(
        "Gemma2", Sizes(3584, 16, 8, 256, 14336, 256000), attn_implementation="eager", query_pre_attn_scalar=256, sliding_window=4096
    ),
    "Phi-3 mini": _decoder("Phi3", Sizes(3072, 32, 32, 96, 8192, 32064), pad_token_id=0),
    "Mixtral 8x7B": _decoder("Mixtral", Sizes(4096, 32, 8, 128, 14336, 32000), num_local_experts=8, num_experts_per_tok=2),
    "GPT-2 XL": _text(of_transformers("GPT2", "LMHeadModel", **_GPT2), 1024),
    "BERT": _text(of_transformers("Bert", "ForMaskedLM", **_BERT, **_NO_DROPOUT), 512),
    "OPT": _text(
        of_transformers(
            "OPT", "ForCausalLM", hidden_size=2048, ffn_dim=8192, num_attention_heads=32, num_hidden_layers=LAYERS, dropout=0.0
        ),
        2048,
    ),
    "ViT": _images(of_transformers("ViT", "ForImageClassification", **_VIT)),
    "ResNet-50": _images(of_transformers("ResNet", "ForImageClassification", num_labels=1000)),
    "U-Net": _unet,
}
"""Name -> builds the model, of real widths and eight layers, and a batch of so many rows."""

_ROWS = {"ViT": 64, "ResNet-50": 32, "U-Net": 2, "BERT": 8, "GPT-2 XL": 4}
"""Rows a device; one of others."""

MESHES: Sequence[Mapping[str, int]] = (
    {"data": 8},
    {"fsdp": 8},
    {"zero1": 8},
    {"tensor": 8},
    {"pipeline": 4, "data": 2},
    {"fsdp": 4, "tensor": 2},
    {"pipeline": 2, "tensor": 4},
    {"pipeline": 2, "fsdp": 4},
    {"data": 2, "fsdp": 8},
    {"data": 2, "tensor": 8},
    {"pipeline": 4, "zero1": 2, "tensor": 4},
    {"fsdp": 64},
    {"pipeline": 4, "zero1": 64, "tensor": 8},
    {"fsdp": 512, "tensor": 8},
)
PRECISIONS, POLICIES = ("bf16-mixed", "32-true"), ("none", "selective", "full")


def settings(models: Sequence[str], meshes: Sequence[str], sample: int) -> list[Setting]:
    """Return the settings of models whose names have one of the words, on meshes with one of the dimensions: ``sample`` of them; 0: all."""
    names = [name for name in MODELS if not models or any(word in name for word in models)]
    chosen = [mesh for mesh in MESHES if not meshes or any(name in mesh for name in meshes)]
    found = [Setting(*each) for each in itertools.product(names, chosen, PRECISIONS, POLICIES)]
    return found[:: max(len(found) // sample, 1)] if sample else found


def differences(setting: Setting) -> tuple[float, float] | None:
    """Return how much more step time and memory than its simulation a plan has, as fractions; None: it does not fit."""
    rows = _ROWS.get(setting.model, 1) * setting.n_devices
    with torch.device("meta"):
        model, args, kwargs = MODELS[setting.model](rows)
    nodes, per_node = max(setting.n_devices // 8, 1), min(setting.n_devices, 8)
    options: dict[str, Any] = {"precision": setting.precision, "recompute": setting.recompute, "memory_limit": 2**40}
    try:
        pm = partition(
            model,
            setting.n_devices,
            setting.mesh,
            example_inputs=args,
            example_kwargs=kwargs,
            cluster=f"h100:{nodes}x{per_node}",
            progress=False,
            **options,
        )
    except InfeasiblePlanError:
        return None
    simulated = pm.simulate()
    return pm.plan.step_time / simulated.step_time - 1, max(pm.plan.memory) / max(simulated.peak_memory) - 1


def measured(found: Sequence[Setting]) -> Iterator[tuple[Setting, tuple[float, float]]]:
    """Yield the differences of each setting that has a plan, and print it."""
    for setting in found:
        started = time.process_time()
        pair = differences(setting)
        words = "refused" if pair is None else f"{pair[0]:+7.1%} {pair[1]:+7.1%}"
        mesh = " ".join(f"{name} {size}" for name, size in setting.mesh.items())
        line = f"{setting.model:14s} {mesh:34s} {setting.precision:11s} {setting.recompute:10s}"
        print(f"{line} {words} {time.process_time() - started:6.1f} s", flush=True)
        if pair is not None:
            yield setting, pair


def main(argv: Sequence[str] | None = None) -> None:
    """Print the differences, and how many are small."""
    parser = argparse.ArgumentParser(description="Planned beside simulated steps and memory.")
    parser.add_argument("--models", nargs="*", default=[], help="parts of names; default: all")
    parser.add_argument("--meshes", nargs="*", default=[], help="dimensions; default: all")
    parser.add_argument("--sample", type=int, default=0, help="how many settings, evenly chosen; 0: all")
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore", PartitionWarning)
    pairs = [pair for _, pair in measured(settings(given.models, given.meshes, given.sample))]
    rows = []
    for name, values in zip(("step time", "memory"), zip(*pairs, strict=True), strict=True):
        sizes = sorted(map(abs, values))
        within = [f"{sum(size <= most for size in sizes)} of {len(sizes)}" for most in (0.03, 0.05)]
        rows.append((name, f"{statistics.median(sizes):.1%}", *within, f"{min(values):+.1%}", f"{max(values):+.1%}"))
    table("Plans relative to their simulations", ("", "median", "within 3 %", "within 5 %", "least", "most"), rows)


if __name__ == "__main__":
    main()
