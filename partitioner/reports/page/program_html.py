"""A program as HTML: an element for each line, so that the page's search can hide and show lines."""

from __future__ import annotations

import re
from html import escape

from passes.ir.comm.primitives import COMMUNICATION

__all__ = ["program_html"]

_COMMUNICATION = re.compile(rf"= ({'|'.join(function.__name__ for function in COMMUNICATION)})\(")


def program_html(title: str, code: str, *, is_open: bool) -> str:
    """Return a program as an expandable section, calls that communicate highlighted."""
    lines = "".join(_line(line) for line in code.strip().splitlines())
    opened = " open" if is_open else ""
    return f'<details{opened}><summary>{escape(title)}</summary><pre class="program">{lines}</pre></details>'


def _line(line: str) -> str:
    """Return a line as a ``<b>`` element with the class ``comment`` or ``communication``, or none."""
    if line.lstrip().startswith("#"):
        return f'<b class="comment">{escape(line)}</b>'
    code, hash_sign, comment = line.partition("  # ")
    kind = ' class="communication"' if _COMMUNICATION.search(code) else ""
    comment_html = f'<span class="comment">{hash_sign}{escape(comment)}</span>' if hash_sign else ""
    return f"<b{kind}>{escape(code) or ' '}{comment_html}</b>"
