"""Formulas as MathML, which browsers typeset by themselves."""

from __future__ import annotations

import re
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
        f'<tr><td>{escape(name)}</td><td><math display="inline">{_typeset(expression)}</math></td></tr>'
        for name, expression in formulas.items()
    )
    below = f'<p class="footnote">{escape(symbols)}</p>' if symbols else ""
    return f'<div class="wide"><table class="formulas">{rows}</table></div>{below}' if formulas else ""


def _typeset(expression: sympy.Expr) -> str:
    """MathML with a little room in products: names of several letters would run into what stands in front of them."""
    text: str = mathml(expression, printer="presentation")
    return re.sub(r"<mo>(?:&InvisibleTimes;|\u2062)</mo>", '<mspace width="0.2em"/>', text)
