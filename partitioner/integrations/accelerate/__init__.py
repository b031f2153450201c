"""accelerate: ``from partitioner.integrations.accelerate import Accelerator`` in place of accelerate's class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partitioner.integrations.interface import import_optional

__all__ = ["Accelerator"]

if TYPE_CHECKING:
    from partitioner.integrations.accelerate.accelerator import Accelerator


def __getattr__(name: str) -> Any:
    """Return the class; accelerate is imported when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_optional(f"{__name__}.accelerator").Accelerator
