"""The peak memory of each device by category, as HTML bars on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cost_models.hardware.units import format_bytes

__all__ = ["bars_html"]


def bars_html(memory: Sequence[Mapping[str, int]], labels: Sequence[str]) -> str:
    """Return the bars; ``memory`` has for each device, or class of equal ones, category -> bytes at its peak."""
    most = max((sum(sizes.values()) for sizes in memory), default=0) or 1
    names = list(memory[0]) if memory else []
    keys = "".join(f'<span class="key"><i style="--colour: var(--{name})"></i>{name}</span>' for name in names)
    rows = []
    for label, sizes in zip(labels, memory, strict=True):
        parts = "".join(
            f'<i style="width: {100 * size / most:.2f}%; --colour: var(--{name})" title="{name}: {format_bytes(size)}"></i>'
            for name, size in sizes.items()
            if size
        )
        rows.append(f'<span>{label}</span><span class="bar">{parts}</span><span>{format_bytes(sum(sizes.values()))}</span>')
    return f'<p>{keys}<span class="key">at the moment of each device\'s peak</span></p><div class="bars">{"".join(rows)}</div>'
