"""The frame of HTML pages: a single file with style, script and links to its sections."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from html import escape


def framed(title: str, header: str, sections: Sequence[tuple[str, str]], footer: str, script: str = "", style: str = "") -> str:
    """Return a page as a single HTML file, without scripts, styles, fonts or pictures from elsewhere.

    Args:
        title: the title of the window.
        header: HTML above the sections.
        sections: (title, HTML); sections without HTML are left out.
        footer: HTML below the sections.
        script: JavaScript of the page.
        style: CSS in addition to the common ``style.css``.
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
    """Return the text of a style sheet or a script, a resource file of a package."""
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")


def tiles_html(tiles: Sequence[tuple[str, str]]) -> str:
    """Return the main figures of a page as large tiles: (number, words)."""
    html = "".join(f"<div class=tile><b>{escape(number)}</b><span>{escape(words)}</span></div>" for number, words in tiles)
    return f'<div class="tiles">{html}</div>'
