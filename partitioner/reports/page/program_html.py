"""A program on a page: a line each, so that a search can hide and show them."""

from __future__ import annotations

import re
from html import escape

from passes.ir.comm.primitives import COMMUNICATION

__all__ = ["program_html"]

_COMMUNICATION = re.compile(rf"= ({'|'.join(function.__name__ for function in COMMUNICATION)})\(")


def program_html(title: str, code: str, *, is_open: bool) -> str:
    """The lines of a program, those that communicate marked."""
    lines = "".join(_line(line) for line in code.strip().splitlines())
    opened = " open" if is_open else ""
    return f'<details{opened}><summary>{escape(title)}</summary><pre class="program">{lines}</pre></details>'


def _line(line: str) -> str:
    if line.lstrip().startswith("#"):
        return f'<b class="comment">{escape(line)}</b>'
    code, hash_sign, comment = line.partition("  # ")
    kind = ' class="communication"' if _COMMUNICATION.search(code) else ""
    told = f'<span class="comment">{hash_sign}{escape(comment)}</span>' if hash_sign else ""
    return f"<b{kind}>{escape(code) or ' '}{told}</b>"
