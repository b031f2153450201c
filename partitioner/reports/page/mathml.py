"""Formulas as MathML, which browsers typeset by themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

import sympy
from sympy.printing.mathml import mathml

__all__ = ["formulas_html"]

_SHORT = 2
"""Terms of a sum that is not split where it is a factor."""


def formulas_html(formulas: Mapping[str, sympy.Expr], symbols: str = "") -> str:
    """A line each: what it is, and the formula.

    Args:
        formulas: in plain words -> what it comes to.
        symbols: what they stand for, for a line below.
    """
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{_lines(expression)}</td></tr>" for name, expression in formulas.items())
    below = f'<p class="footnote">{escape(symbols)}</p>' if symbols else ""
    return f'<div class="wide"><table class="formulas">{rows}</table></div>{below}' if formulas else ""


def _lines(expression: sympy.Expr) -> str:
    """Return a formula in pieces, one for each term, between which a browser may begin a new line."""
    return " ".join(f'<math display="inline">{piece}</math>' for piece in _pieces(expression))


def _pieces(expression: sympy.Expr) -> list[str]:
    """Split sums at their terms, also inside of ``max`` and of products; what remains is typeset whole."""
    if isinstance(expression, sympy.Max):
        parts = [_pieces(part) for part in expression.args]
        joined = [piece for part in parts[:-1] for piece in _followed(part, ",")] + parts[-1]
        return _enclosed("<mi>max</mi><mo>(</mo>", joined)
    if isinstance(expression, sympy.Add):
        first, *rest = expression.as_ordered_terms()
        return [*_pieces(first), *(piece for term in rest for piece in _signed(term))]
    sums = [factor for factor in sympy.Mul.make_args(expression) if isinstance(factor, sympy.Add) and len(factor.args) > _SHORT]
    if not sums:
        return [_typeset(expression)]
    others = sympy.Mul(*(factor for factor in sympy.Mul.make_args(expression) if factor not in sums))
    pieces = [] if others == 1 else [f"{_factor(others)}"]
    return pieces + [piece for factor in sums for piece in _enclosed("<mo>(</mo>", _pieces(factor))]


def _factor(expression: sympy.Expr) -> str:
    """Return what stands in front of a bracket."""
    return f"<mo>(</mo>{_typeset(expression)}<mo>)</mo>" if isinstance(expression, sympy.Add) else _typeset(expression)


def _signed(term: sympy.Expr) -> list[str]:
    is_negative = term.could_extract_minus_sign()
    first, *rest = _pieces(-term if is_negative else term)
    return [f"<mo>{'-' if is_negative else '+'}</mo><mspace width='0.2em'/>{first}", *rest]


def _followed(pieces: list[str], mark: str) -> list[str]:
    return [*pieces[:-1], f"{pieces[-1]}<mo>{mark}</mo>"]


def _enclosed(opening: str, pieces: list[str]) -> list[str]:
    return _followed([f"{opening}{pieces[0]}", *pieces[1:]], ")")


def _typeset(expression: sympy.Expr) -> str:
    """MathML with a little room in products: names of several letters would run into what stands in front of them."""
    text: str = mathml(expression, printer="presentation")
    return re.sub(r"<mo>(?:&InvisibleTimes;|\u2062)</mo>", '<mspace width="0.2em"/>', text)
