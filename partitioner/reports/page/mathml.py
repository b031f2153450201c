"""Formulas as MathML, which browsers typeset by themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

import sympy
from sympy.printing.mathml import mathml

__all__ = ["formulas_html"]

_SHORT = 2
"""Largest number of terms of a sum that stays in one piece as a factor of a product."""


def formulas_html(formulas: Mapping[str, sympy.Expr], symbols: str = "") -> str:
    """Return formulas, by the names of their quantities, as an HTML table; ``symbols`` is a line below that explains the symbols."""
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
        joined = [piece for part in parts[:-1] for piece in _append(part, ",")] + parts[-1]
        return _enclose("<mi>max</mi><mo>(</mo>", joined)
    if isinstance(expression, sympy.Add):
        first, *rest = expression.as_ordered_terms()
        return [*_pieces(first), *(piece for term in rest for piece in _signed_pieces(term))]
    sums = [factor for factor in sympy.Mul.make_args(expression) if isinstance(factor, sympy.Add) and len(factor.args) > _SHORT]
    if not sums:
        return [_typeset(expression)]
    others = sympy.Mul(*(factor for factor in sympy.Mul.make_args(expression) if factor not in sums))
    pieces = [] if others == 1 else [_factor(others)]
    return pieces + [piece for factor in sums for piece in _enclose("<mo>(</mo>", _pieces(factor))]


def _factor(expression: sympy.Expr) -> str:
    """Typeset a factor of a product: a sum in brackets, anything else without."""
    return f"<mo>(</mo>{_typeset(expression)}<mo>)</mo>" if isinstance(expression, sympy.Add) else _typeset(expression)


def _signed_pieces(term: sympy.Expr) -> list[str]:
    """Split a term of a sum, with its sign in front."""
    is_negative = term.could_extract_minus_sign()
    first, *rest = _pieces(-term if is_negative else term)
    return [f"<mo>{'-' if is_negative else '+'}</mo><mspace width='0.2em'/>{first}", *rest]


def _append(pieces: list[str], mark: str) -> list[str]:
    """Append a comma or a bracket to the last piece."""
    return [*pieces[:-1], f"{pieces[-1]}<mo>{mark}</mo>"]


def _enclose(opening: str, pieces: list[str]) -> list[str]:
    return _append([f"{opening}{pieces[0]}", *pieces[1:]], ")")


def _typeset(expression: sympy.Expr) -> str:
    """Return MathML with a space between factors, which separates symbols of several letters."""
    text: str = mathml(expression, printer="presentation")
    return re.sub(r"<mo>(?:&InvisibleTimes;|\u2062)</mo>", '<mspace width="0.2em"/>', text)
