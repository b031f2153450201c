"""Stages of different width, as tests ask for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from partitioner import PartitionedModel, partition
from tests.support.planning.small_pipelines import inputs, perceptron

Widths: TypeAlias = tuple[int, ...]
"""For each stage, how many ranks share it."""


def mode(widths: Widths, **beside: Any) -> dict[str, Any]:
    return {"pipeline": len(widths), "tensor": widths, **beside}


def ranks_of(mesh: Mapping[str, Any]) -> int:
    turns = mesh["pipeline"] if isinstance(mesh["pipeline"], tuple) else (1,) * mesh["pipeline"]
    beside = math.prod(size for name, size in mesh.items() if name not in ("pipeline", "tensor"))
    return int(beside * sum(count * width for count, width in zip(turns, mesh["tensor"], strict=True)))


def on(widths: Widths, **arguments: Any) -> PartitionedModel:
    return partition(perceptron(), sum(widths), mode(widths), example_inputs=inputs(12)[:1], progress=False, **arguments)
