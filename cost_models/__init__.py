"""Numbers about graphs: hardware, operations, collectives, memory. Rewrites nothing, runs no processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cost_models.cost_model import CostModel, Roofline
    from cost_models.hardware.clusters import Cluster, Device, Link

__all__ = ["Cluster", "CostModel", "Device", "Link", "Roofline"]

_MODULES = {
    "Cluster": "cost_models.hardware.clusters",
    "CostModel": "cost_models.cost_model",
    "Device": "cost_models.hardware.clusters",
    "Link": "cost_models.hardware.clusters",
    "Roofline": "cost_models.cost_model",
}
"""Public name -> the module that has it, imported when the name is first used."""


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__]
