"""Tests in folders that mirror the packages, whole-product tests in ``end_to_end``; what they share is in ``support``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).parents[1]
"""Root of the project."""
