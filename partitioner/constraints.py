"""What a user has decided already: the planner decides the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from passes.ir.errors import ConfigError

__all__ = ["Constraints"]


@dataclass(frozen=True)
class Constraints:
    """Decisions that a plan must keep to.

    Attributes:
        device_map: module name -> rank, or device (``"cuda:1"``), as transformers and accelerate write it. A module has the entry of
            its longest prefix; ``""`` is the entry of all the rest; a module with none is planned.
        tp_plan: tensor-parallel patterns; not available in pipeline mode.
        split_spec: module name -> ``"beginning"`` or ``"end"`` (or ``torch.distributed.pipelining.SplitPoint``): a stage begins there.
        axes: axis name -> mesh dimension; not available in pipeline mode.
        pin: module or node name -> stage.

    Raises:
        ConfigError: of a kind that is not available yet.
    """

    device_map: Mapping[str, int | str | torch.device] | None = None
    tp_plan: Mapping[str, str] | None = None
    split_spec: Mapping[str, Any] | None = None
    axes: Mapping[str, str] | None = None
    pin: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for name, mode in (("tp_plan", "tensor"), ("axes", "tensor")):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"Constraints({name}=...) belongs to mode {mode!r}, which is not available yet",
                    remedy='use device_map, split_spec or pin, with mode "pipeline" or "model"',
                )
