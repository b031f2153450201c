"""accelerate: an Accelerator whose steps run by the plan's schedule; its processes are replicas of a partitioned model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Accelerator"]

if TYPE_CHECKING:
    from accelerate import Accelerator


def __getattr__(name: str) -> Any:
    """Return the class; accelerate is imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from partitioner.integrations.accelerate.accelerator import accelerator_class  # noqa: PLC0415  it imports accelerate

    return accelerator_class()
