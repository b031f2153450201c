"""Short texts for module names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

_NUMBERED = re.compile(r"(.*?)(\d+)$")
_BLOCK = re.compile(r"[^.]+(\.[^.]+)*?\.\d+(?=\.|$)")
"""The path of the outermost module with a number."""

_SHORT = 24
"""Letters of a short name."""


def module_range(modules: Sequence[str], width: int = 44) -> str:
    """Return the modules of a stage as text: consecutive numbers as a range, shortened to about ``width`` letters if longer.

    >>> module_range(("wte", "h.0", "h.1", "h.2", "ln_f", "lm_head"))
    'wte, h.0-2, ln_f, lm_head'
    >>> module_range(("encoder.embeddings", "encoder.layers.0", "pooler", "classifier.dense"), width=40)
    'encoder.embeddings ... classifier.dense'
    >>> [module_range(("h.1.ln_1", "h.1.attn.c_attn", "h.1.attn.c_proj"), width) for width in (26, 20)]
    ['h.1.(ln_1 ... attn.c_proj)', 'part of h.1']
    >>> module_range(("wte", "h.0.ln_1", "h.0.attn.c_attn"), 16), module_range(("h.1", "h.1.attn.c_proj"), 16)
    ('wte ... h.0', 'part of h.1')
    """
    parts: list[str] = []
    range_start = previous = ""
    for name in (module or "(the model itself)" for module in modules):
        number, number_before = _NUMBERED.fullmatch(name), _NUMBERED.fullmatch(previous)
        if number and number_before and number[1] == number_before[1] and int(number[2]) == int(number_before[2]) + 1:
            parts[-1] = f"{range_start}-{number[2]}"
        else:
            range_start = name
            parts.append(name)
        previous = name
    text = ", ".join(parts)
    if len(text) <= width or len(parts) == 1:
        return text
    return _first_and_last(parts[0], ", " if len(parts) == 2 else " ... ", parts[-1], width)


def _first_and_last(first: str, separator: str, last: str, width: int) -> str:
    """Join two names; if that is too long, factor out their common prefix, or name only the numbered blocks that they are in."""
    plain = f"{first}{separator}{last}"
    if len(plain) <= width:
        return plain
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first.split("."), last.split("."), strict=False))
    prefix = ".".join(part for part, _ in pairs)
    without_prefix = f"{first.removeprefix(f'{prefix}.')}{separator}{last.removeprefix(f'{prefix}.')}"
    if prefix and first != prefix and len(prefix) + len(without_prefix) + 3 <= width:
        return f"{prefix}.({without_prefix})"
    if _NUMBERED.fullmatch(prefix):
        return f"part of {prefix}"
    blocks = (_BLOCK.match(first), _BLOCK.match(last))
    shorter = separator.join(block[0] if block else name for block, name in zip(blocks, (first, last), strict=True))
    return f"...{without_prefix}" if prefix and len(without_prefix) + 3 < len(shorter) else shorter


def short_name(name: str) -> str:
    """Return the last parts of a module path, at most about 24 letters; ``"the model itself"`` for an empty path.

    >>> short_name("bert.encoder.layer.0.attention.self.query"), short_name("")
    ('...0.attention.self.query', 'the model itself')
    """
    if len(name) <= _SHORT:
        return name or "the model itself"
    parts = name.split(".")
    while len(parts) > 1 and len(".".join(parts)) > _SHORT:
        parts = parts[1:]
    return "..." + ".".join(parts)
