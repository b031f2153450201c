"""Tables as aligned text and as HTML."""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_GAP = 2
"""Spaces between columns."""


@dataclass(frozen=True)
class Table:
    """A table for a terminal or a page.

    Attributes:
        rows: cells as text, the heading first.
        columns: alignment of the columns, see ``align``.
        footnote: a line below the table that says how to read it.
    """

    rows: Sequence[Sequence[str]]
    columns: str
    footnote: str = ""

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines for a terminal; cells of left-aligned columns are wrapped if rows are wider than ``width`` letters."""
        rows = self.rows if width is None else _wrap_cells(self.rows, self.columns, width)
        return [*align(rows, self.columns), *([self.footnote] if self.footnote else [])]

    def html(self) -> str:
        """Return the table for a page."""
        below = f'<p class="footnote">{html.escape(self.footnote)}</p>' if self.footnote else ""
        return f"{html_table(self.rows, self.columns)}{below}"


def _wrap_cells(rows: Sequence[Sequence[str]], columns: str, width: int) -> list[Sequence[str]]:
    """Narrow the widest left-aligned columns, wrapping cells between words, until rows fit ``width`` or no column can be narrower.

    >>> _wrap_cells([("bytes", "why"), ("4.50 KiB", "token -> blocks.0.norm")], "><", 24)
    [('bytes', 'why'), ('4.50 KiB', 'token ->'), ('', 'blocks.0.norm')]
    """
    cells = list(zip(*rows, strict=True))
    natural = [max(map(len, column)) for column in cells]
    longest_words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in cells]
    least = [word if side == "<" else whole for side, word, whole in zip(columns, longest_words, natural, strict=True)]
    widths = list(natural)
    while widths != least and sum(widths) + _GAP * (len(widths) - 1) > width:
        can_shrink = [column for column in range(len(widths)) if widths[column] > least[column]]
        widths[max(can_shrink, key=widths.__getitem__)] -= 1
    if widths == natural:
        return list(rows)
    wrapped: list[Sequence[str]] = []
    for row in rows:
        lines_of_cells = [
            textwrap.wrap(cell, limit, break_long_words=False, break_on_hyphens=False) if side == "<" else [cell]
            for side, cell, limit in zip(columns, row, widths, strict=True)
        ]
        wrapped += itertools.zip_longest(*lines_of_cells, fillvalue="")
    return wrapped


def align(rows: Sequence[Sequence[str]], columns: str) -> list[str]:
    """Format rows as lines of text, each column as wide as its widest cell.

    Args:
        rows: cells as text, the heading first if there is one.
        columns: for each column ``<`` to align it left or ``>`` to align it right.

    >>> align([("stage", "bytes"), ("0", "12.5 KiB")], "<>")
    ['stage     bytes', '0      12.5 KiB']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    return [
        (" " * _GAP).join(f"{cell:{side}{width}}" for cell, side, width in zip(row, columns, widths, strict=True)).rstrip() for row in rows
    ]


def html_table(rows: Sequence[Sequence[str]], columns: str, *, caption: str = "") -> str:
    """Format rows as an HTML table; the first row is the heading.

    Args:
        rows: cells as text: they are escaped.
        columns: as for ``align``.
        caption: a line above the table.
    """
    sides = ["left" if side == "<" else "right" for side in columns]

    def line(row: Sequence[str], tag: str) -> str:
        cells = (f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>' for cell, side in zip(row, sides, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows[1:])
    above = f'<caption style="text-align: left; caption-side: top">{html.escape(caption)}</caption>' if caption else ""
    return f"<table>{above}<thead>{line(rows[0], 'th')}</thead><tbody>{body}</tbody></table>"
