"""Nothing is declared: earlier installations have an entry point that `import torch` loads from here."""

from __future__ import annotations

__all__ = ["declare_strategies"]


def declare_strategies() -> None:
    """Do nothing."""
