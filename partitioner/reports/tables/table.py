"""Tables as aligned text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table", "align", "html_table"]


@dataclass(frozen=True)
class Table:
    """A table for a terminal or a page.

    Attributes:
        rows: cells as text, the heading first.
        columns: see ``align``.
        footnote: how to read it.
    """

    rows: Sequence[Sequence[str]]
    columns: str
    footnote: str = ""

    def lines(self) -> list[str]:
        """For a terminal."""
        return [*align(self.rows, self.columns), *([self.footnote] if self.footnote else [])]

    def html(self) -> str:
        """For a page."""
        below = f'<p class="footnote">{html.escape(self.footnote)}</p>' if self.footnote else ""
        return f"{html_table(self.rows, self.columns)}{below}"


def align(rows: Sequence[Sequence[str]], columns: str, *, gap: int = 2) -> list[str]:
    """One line a row, each column as wide as its widest cell.

    Args:
        rows: cells as text, the heading first if there is one.
        columns: for each column, ``<`` to put its cells left or ``>`` to put them right.
        gap: spaces between columns.

    >>> align([("stage", "bytes"), ("0", "12.5 KiB")], "<>")
    ['stage     bytes', '0      12.5 KiB']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    return [
        (" " * gap).join(f"{cell:{side}{width}}" for cell, side, width in zip(row, columns, widths, strict=True)).rstrip() for row in rows
    ]


def html_table(rows: Sequence[Sequence[str]], columns: str, *, caption: str = "") -> str:
    """The same as an HTML table; the first row is the heading.

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
