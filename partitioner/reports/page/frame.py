"""What pages have in common: one file, one style, light or dark as the reader has it, sections to jump to."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from html import escape

__all__ = ["framed", "page_file", "tiles_html"]


def framed(title: str, header: str, sections: Sequence[tuple[str, str]], footer: str, script: str = "", style: str = "") -> str:
    """A page as a single HTML file: no scripts, styles, fonts or pictures from elsewhere.

    Args:
        title: of the window.
        header: HTML above all.
        sections: title and HTML of each; those without HTML are left out.
        footer: HTML below all.
        script: what the page does.
        style: more than the common one.
    """
    shown = [(name, body) for name, body in sections if body]
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in shown)
    bodies = "".join(f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{body}</section>' for name, body in shown)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{page_file("style.css")}{style}</style>\n</head>\n'
        f"<body>\n<header>{header}</header>\n<main><nav>{links}</nav>{bodies}</main>\n"
        f"<footer>{footer}</footer>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _anchor(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def page_file(name: str, package: str = "partitioner.reports.page") -> str:
    """A style or a script that lies beside the code."""
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")


def tiles_html(tiles: Sequence[tuple[str, str]]) -> str:
    """The numbers that one looks for first, each with its words."""
    found = "".join(f"<div class=tile><b>{escape(number)}</b><span>{escape(words)}</span></div>" for number, words in tiles)
    return f'<div class="tiles">{found}</div>'
