"""Arguments of ``partition`` that an integration takes as options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from partitioner.api import partition
from passes.ir.errors import ConfigError

__all__ = ["checked_options"]


def checked_options(options: Mapping[str, Any], given: Mapping[str, str], taker: str) -> dict[str, Any]:
    """Return the options; raise ConfigError for those that ``partition`` does not take, or that do not apply.

    Args:
        given: argument of ``partition`` that is no option -> what takes its place.
        taker: of the options, for errors.
    """
    names = tuple(name for name in inspect.signature(partition).parameters if name not in given)
    for name in options:
        if name in given:
            raise ConfigError(f"{name} is no option of {taker}: {given[name]}", remedy="leave it out")
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{taker} has no option {name!r}", remedy=f"{meant}its options are {', '.join(names)}")
    return dict(options)
