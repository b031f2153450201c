"""Bytes of ranks as HTML: those that each sends to each other one, as a table, and those of its peak memory by category, as bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from cost_models.hardware.units import format_bytes

_READABLE = 16
"""Largest number of ranks with numbers in the cells; with more ranks, numbers are tooltips only."""


def matrix_html(sent: Mapping[tuple[int, int], int], classes: Sequence[Sequence[int]]) -> str:
    """Return the table of classes of ranks, darker where there are more bytes; of few ranks, each is a class.

    Args:
        sent: (source, destination) -> the bytes of a step.
    """
    class_of = {rank: index for index, ranks in enumerate(classes) for rank in ranks}
    totals: Counter[tuple[int, int]] = Counter()
    for (source, destination), size in sent.items():
        totals[class_of[source], class_of[destination]] += size
    most = max(totals.values(), default=0)
    dense = len(classes) > _READABLE
    words = [f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks like {ranks[0]}" for ranks in classes]
    marks = ["" if dense and index % 8 else str(ranks[0]) for index, ranks in enumerate(classes)]
    head = "".join(f"<th>{mark}</th>" for mark in marks)
    rows = []
    for source, mark in enumerate(marks):
        cells = []
        for destination in range(len(classes)):
            size = totals[source, destination]
            style = f' style="--share: {0.08 + 0.6 * size / most:.2f}"' if size else ""
            title = f"{words[source]} to {words[destination]}: {format_bytes(size)}"
            cells.append(f'<td title="{title}"{style}>{format_bytes(size) if size and not dense else ""}</td>')
        rows.append(f"<tr><th>{mark}</th>{''.join(cells)}</tr>")
    kind = "matrix dense" if dense else "matrix"
    alike = "" if len(classes) == len(class_of) else ", each with those like it"
    return (
        f'<table class="{kind}"><caption>from rank (down) to rank (across){alike}</caption><tr><th></th>{head}</tr>{"".join(rows)}</table>'
    )


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
