"""Names of modules in few words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

__all__ = ["module_range", "rank_list", "rank_numbers", "short_name"]

_NUMBERED = re.compile(r"(.*?)(\d+)$")
_BLOCK = re.compile(r"[^.]+(\.[^.]+)*?\.\d+(?=\.|$)")
"""The path of the outermost module with a number."""


def module_range(modules: Sequence[str], width: int = 44) -> str:
    """The modules of a stage: numbered neighbours as a range, the middle left out where it gets too long.

    >>> module_range(("wte", "h.0", "h.1", "h.2", "ln_f", "lm_head"))
    'wte, h.0-2, ln_f, lm_head'
    >>> module_range(("encoder.embeddings", "encoder.layers.0", "pooler", "classifier.dense"), width=40)
    'encoder.embeddings ... classifier.dense'
    >>> [module_range(("h.1.ln_1", "h.1.attn.c_attn", "h.1.attn.c_proj"), width) for width in (26, 20)]
    ['h.1.(ln_1 ... attn.c_proj)', 'part of h.1']
    >>> module_range(("wte", "h.0.ln_1", "h.0.attn.c_attn"), 16), module_range(("h.1", "h.1.attn.c_proj"), 16)
    ('wte ... h.0', 'part of h.1')
    """
    named = [name or "(the model itself)" for name in modules]
    parts: list[str] = []
    first = last = ""
    for name in named:
        number, before = _NUMBERED.fullmatch(name), _NUMBERED.fullmatch(last)
        if number and before and number[1] == before[1] and int(number[2]) == int(before[2]) + 1:
            parts[-1] = f"{first}-{number[2]}"
        else:
            first = name
            parts.append(name)
        last = name
    text = ", ".join(parts)
    return text if len(text) <= width or len(parts) == 1 else _from_to(parts[0], ", " if len(parts) == 2 else " ... ", parts[-1], width)


def _from_to(first: str, joint: str, last: str, width: int) -> str:
    """Two names, and where they are too long, the module that holds both but once, or nothing but the block that does."""
    plain = f"{first}{joint}{last}"
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first.split("."), last.split("."), strict=False))
    shared = ".".join(part for part, _ in pairs)
    if len(plain) <= width:
        return plain
    inside = f"{first.removeprefix(f'{shared}.')}{joint}{last.removeprefix(f'{shared}.')}"
    if shared and first != shared and len(shared) + len(inside) + 3 <= width:
        return f"{shared}.({inside})"
    if _NUMBERED.fullmatch(shared):
        return f"part of {shared}"
    blocks = (_BLOCK.match(first), _BLOCK.match(last))
    shorter = joint.join(block[0] if block else name for block, name in zip(blocks, (first, last), strict=True))
    return f"...{inside}" if shared and len(inside) + 3 < len(shorter) else shorter


def short_name(name: str, width: int = 24) -> str:
    """The end of a long module path; the model itself has none.

    >>> short_name("bert.encoder.layer.0.attention.self.query"), short_name("")
    ('...0.attention.self.query', 'the model itself')
    """
    if len(name) <= width:
        return name or "the model itself"
    parts = name.split(".")
    while len(parts) > 1 and len(".".join(parts)) > width:
        parts = parts[1:]
    return "..." + ".".join(parts)


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks as a reader says them.

    >>> rank_list((0, 2)), rank_list((0, 1, 2, 3))
    ('ranks 0 and 2', 'ranks 0 to 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def rank_numbers(ranks: Sequence[int]) -> str:
    """Ranks in few letters.

    >>> rank_numbers((0, 2)), rank_numbers((0, 1, 2, 3))
    ('0, 2', '0-3')
    """
    if len(ranks) > 2 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
