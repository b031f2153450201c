"""Pictures as SVG, with nothing to install: one frame, and colours that are light or dark as the page is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

Colour = tuple[str, str]
"""On a light page, and on a dark one."""

INK: Mapping[str, Colour] = {
    "ink": ("#1c1e21", "#e6e8eb"),
    "faint": ("#6b7280", "#9aa3ae"),
    "line": ("#d7dbe0", "#3a4048"),
    "paper": ("#ffffff", "#16191d"),
}
"""Text, fine print, borders, ground: of all pictures."""


def document(kind: str, width: float, height: float, label: str, style: str, parts: Iterable[str]) -> str:
    """Return a picture.

    Args:
        kind: its class, which its style names.
        width, height: in pixels.
        label: its content, for screen readers.
        style: rules, the text of a ``style`` element.
        parts: elements, the lowest first.
    """
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" {size} role="img" aria-label="{escape(label)}">'
    return "\n".join([opening, f"<style>\n{style}\n</style>", *parts, "</svg>"]) + "\n"


def palette(kind: str, colours: Mapping[str, Colour]) -> str:
    """Return the rules that give each colour of a kind of picture a variable of its name, so that a page can change it."""
    light, dark = ("; ".join(f"--{name}: {shades[shade]}" for name, shades in {**INK, **colours}.items()) for shade in (0, 1))
    return f".{kind} {{ {light} }}\n@media (prefers-color-scheme: dark) {{ .{kind} {{ {dark} }} }}"
