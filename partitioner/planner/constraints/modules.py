"""Modules as constraints name them."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from passes.ir.errors import ConfigError

__all__ = ["check_module"]


def check_module(name: str, known: Collection[str], said: str) -> None:
    """Raise ConfigError for a name that is not known, with those that are close to it; ``said``: what names it, a subject and a verb."""
    if name not in known:
        close = difflib.get_close_matches(name, sorted(known), n=3)
        raise ConfigError(
            f"{said} {name!r}, which is no module of the model",
            remedy=f"did you mean {' or '.join(map(repr, close))}?" if close else "write names as model.named_modules() gives them",
        )
