"""Values of a parameter that run with the full matrices alone, beside others that are quick."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Mark values of a parameter slow: ``parametrize("size", [1, *slow(2, 3)])``."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def all_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Mark all values slow but the quick ones, in their order."""
    kept = list(quick)
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
