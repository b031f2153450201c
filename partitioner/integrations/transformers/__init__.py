"""transformers: a Trainer whose steps run by the plan's schedule; checkpoints of Trainer have the states of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Trainer"]

if TYPE_CHECKING:
    from transformers import Trainer


def __getattr__(name: str) -> Any:
    """Return the class; transformers is imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from partitioner.integrations.transformers.trainer import trainer_class  # noqa: PLC0415  it imports transformers

    return trainer_class()
