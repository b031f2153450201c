"""What a user has decided already: the planner decides the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Constraints"]


@dataclass(frozen=True)
class Constraints:
    """Decisions that a plan must keep to.

    Attributes:
        device_map: module name -> rank, or device (``"cuda:1"``), as transformers and accelerate write it. A module has the entry of
            its longest prefix; ``""`` is the entry of all the rest; a module with none is planned.
        tp_plan: transformers' tensor-parallel patterns -> how a weight is cut: ``{"layers.*.mlp.up_proj": "colwise"}``, over the
            mesh dimension ``"tensor"``. The beginning of a pattern may be left out.
        split_spec: module name -> ``"beginning"`` or ``"end"`` (or ``torch.distributed.pipelining.SplitPoint``): a stage begins there.
        axes: axis name (``"heads"``, ``"ffn[3]"``) -> mesh dimension that cuts it, beside those that the planner chooses.
            ``{"sequence": "tensor"}`` is Megatron sequence parallelism, ``{"experts": "data"}`` expert parallelism.
        pin: module or node name -> stage.
    """

    device_map: Mapping[str, int | str | torch.device] | None = None
    tp_plan: Mapping[str, str] | None = None
    split_spec: Mapping[str, Any] | None = None
    axes: Mapping[str, str] | None = None
    pin: Mapping[str, int] | None = None
