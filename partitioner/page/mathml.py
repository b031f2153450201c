"""Formulas as MathML, which browsers typeset by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import sympy
from sympy.printing.mathml import mathml

__all__ = ["formulas_html"]


def formulas_html(formulas: Mapping[str, sympy.Expr], symbols: str = "") -> str:
    """A line each: what it is, and the formula.

    Args:
        formulas: in plain words -> what it comes to.
        symbols: what they stand for, for a line below.
    """
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td><math display="inline">{mathml(expression, printer="presentation")}</math></td></tr>'
        for name, expression in formulas.items()
    )
    below = f'<p class="footnote">{escape(symbols)}</p>' if symbols else ""
    return f'<div class="wide"><table class="formulas">{rows}</table></div>{below}' if formulas else ""
