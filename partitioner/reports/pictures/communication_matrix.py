"""The bytes that each rank sends to each other rank, as an HTML table; darker cells have more bytes."""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.hardware.units import format_bytes

__all__ = ["matrix_html"]

_READABLE = 16
"""Largest number of ranks with numbers in the cells; with more ranks, numbers are tooltips only."""


def matrix_html(sent: Mapping[tuple[int, int], int], n_ranks: int) -> str:
    """Return the table of all ranks; ``sent`` maps (source, destination) to the bytes of a step."""
    most = max(sent.values(), default=0)
    dense = n_ranks > _READABLE
    marks = ["" if dense and rank % 8 else str(rank) for rank in range(n_ranks)]
    head = "".join(f"<th>{mark}</th>" for mark in marks)
    rows = []
    for source in range(n_ranks):
        cells = []
        for destination in range(n_ranks):
            size = sent.get((source, destination), 0)
            style = f' style="--share: {0.08 + 0.6 * size / most:.2f}"' if size else ""
            words = f"rank {source} to rank {destination}: {format_bytes(size)}"
            cells.append(f'<td title="{words}"{style}>{format_bytes(size) if size and not dense else ""}</td>')
        rows.append(f"<tr><th>{marks[source]}</th>{''.join(cells)}</tr>")
    kind = "matrix dense" if dense else "matrix"
    return f'<table class="{kind}"><caption>from rank (down) to rank (across)</caption><tr><th></th>{head}</tr>{"".join(rows)}</table>'
