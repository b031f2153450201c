"""Small models on stages of unlike width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition

__all__ = ["Widths", "inputs", "mode", "on", "perceptron", "ranks_of"]

Widths: TypeAlias = tuple[int, ...]
"""For each stage, how many ranks share it."""


def mode(widths: Widths, **beside: Any) -> dict[str, Any]:
    return {"pipeline": len(widths), "tensor": widths, **beside}


def ranks_of(mesh: Mapping[str, Any]) -> int:
    turns = mesh["pipeline"] if isinstance(mesh["pipeline"], tuple) else (1,) * mesh["pipeline"]
    beside = math.prod(size for name, size in mesh.items() if name not in ("pipeline", "tensor"))
    return int(beside * sum(count * width for count, width in zip(turns, mesh["tensor"], strict=True)))


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))).double()


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, dtype=torch.float64, generator=generator), torch.randn(rows, 4, dtype=torch.float64, generator=generator)


def on(widths: Widths, **arguments: Any) -> PartitionedModel:
    return partition(perceptron(), sum(widths), mode(widths), example_inputs=inputs(12)[:1], progress=False, **arguments)
