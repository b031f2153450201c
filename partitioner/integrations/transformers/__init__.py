"""transformers: ``from partitioner.integrations.transformers import Trainer`` in place of transformers' class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partitioner.integrations.interface import import_optional

__all__ = ["Trainer"]

if TYPE_CHECKING:
    from partitioner.integrations.transformers.trainer import Trainer


def __getattr__(name: str) -> Any:
    """Return the class; transformers is imported when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_optional(f"{__name__}.trainer").Trainer
