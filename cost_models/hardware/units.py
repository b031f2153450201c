"""Sizes and times as people write them."""

from __future__ import annotations

import re

from passes.ir.arguments.describe import described
from passes.ir.errors import ConfigError

_FACTORS = {
    "b": 1,
    **{f"{prefix.lower()}b": 1000 ** (power + 1) for power, prefix in enumerate("KMGT")},
    **{f"{prefix.lower()}ib": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")},
}


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes from a number or text; raise ConfigError when it is neither or not positive.

    >>> parse_bytes("16GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
    (17179869184, 1500000, 4096)
    """
    remedy = 'write a number of bytes, or a number and a unit: 17179869184, "16GiB", "80 GB"'
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", size)
        factor = _FACTORS.get(match[2].lower() or "b") if match else None
        if match is None or factor is None:
            raise ConfigError(f"{described(size)} is not a size in bytes", remedy=remedy)
        size = int(float(match[1]) * factor)
    if isinstance(size, bool) or size <= 0:
        raise ConfigError(f"a size must be positive, got {size}", remedy=remedy)
    return size


def format_bytes(size: float) -> str:
    """Format with three significant digits and a binary unit.

    >>> format_bytes(17179869184), format_bytes(1500), format_bytes(12)
    ('16.0 GiB', '1.46 KiB', '12 B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= _FACTORS[unit.lower()]:
            return f"{_three_digits(size / _FACTORS[unit.lower()])} {unit}"
    return f"{size:.0f} B"


def enough_bytes(size: float) -> str:
    """Format as ``format_bytes``, rounded up: the text is never less than the size.

    >>> enough_bytes(17179869184), enough_bytes(1500)
    ('16.0 GiB', '1.48 KiB')
    """
    text = format_bytes(size)
    return text if parse_bytes(text) >= size else format_bytes(size * 1.01)


def format_flops(flops: float) -> str:
    """Format with three significant digits and a decimal unit.

    >>> format_flops(3.24e9), format_flops(720)
    ('3.24 GFLOP', '720 FLOP')
    """
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(flops) >= scale:
            return f"{_three_digits(flops / scale)} {unit}FLOP"
    return f"{flops:.0f} FLOP"


def format_seconds(seconds: float) -> str:
    """Format with three significant digits and a suitable unit.

    >>> format_seconds(0.0123), format_seconds(75), format_seconds(4e-7)
    ('12.3 ms', '75.0 s', '400 ns')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _three_digits(number: float) -> str:
    whole_digits = len(str(int(abs(number))))
    return f"{number:.{max(0, 3 - whole_digits)}f}"
