"""The language of rules: one line describes an op as loops over the dimensions of its operands and results.

    batch* in, out in, +out -> batch* out; linear input | weight

Before the arrow is a term for each tensor operand, after it a term for each result; a single result term describes all results. A term
lists dimensions by the factor (the loop) that runs over each.

    name            a factor; one that no result has is summed over (with a star it needs a mark ``:sum``)
    name'           another factor of the same readable name (``height -> height'``)
    name*           any number of dimensions, aligned at their right ends
    name?           a dimension that a tensor of fewer dimensions lacks
    (outer inner)   one dimension made of several factors, outermost first
    1               a dimension of size one
    name!           cannot be cut
    name~           of an operand: the factor, which the result has, slides over the dimension (``passes.rules.window``)
    name:max        a factor in no result, over which the results of parts are combined by ``sum``, ``max``, ``min`` or ``mean``
    +term           added to the result
    ()              a term without dimensions, where it stands alone
    _               an operand of which neither values nor sizes are read
    ...             (instead of all terms) every operand and result is ``dim*``: elementwise with broadcasting

An operand's dimension of size one is broadcast if its factor is larger. The term of an optional operand is skipped if the call does not
pass it. After semicolons:

    groups = num_groups     the size of a factor is an argument; a part passes the size of its part
    inner = 16              the size of a factor
    shape size              an argument is the shape of the first result; a part passes the shape of its part
    linear self | other     the result is linear in each of these parameters; ``linear self other``: in both together.
                            Added operands belong to every set; of a list of tensors, ``tensors.0`` is one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from passes.ir.errors import ConfigError
from passes.rules.loops import Reduction

ANY_DIMENSION = "dim"
"""The name of factors without a meaning, which do not name axes."""

_TOKEN = re.compile(r"\s*(?P<token>->|\.\.\.|[A-Za-z][A-Za-z0-9_]*'*|[0-9]+|[-,+()*?!:;=|_.~]|\S)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*'*")


class RuleSyntaxError(ConfigError):
    """A rule that cannot be parsed; shows the token."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        super().__init__(
            f"the rule cannot be read at position {position}: {problem}\n    {text}\n    {' ' * position}^",
            remedy='write it as in "batch* in, out in, +out -> batch* out"; passes/rules/language.py explains the marks',
        )
        self.position = position


@dataclass(frozen=True)
class Dim:
    """A dimension in a term.

    Attributes:
        names: its factors, outermost first; none for a dimension of size one.
        star: whether it matches any number of dimensions.
        optional: whether a tensor may lack it.
        window: whether its factor slides over it.
    """

    names: tuple[str, ...]
    star: bool = False
    optional: bool = False
    window: bool = False


@dataclass(frozen=True)
class Term:
    """The dimensions of one operand or result.

    Attributes:
        dims: in order.
        added: whether the operand is added to the result.
        unread: whether neither values nor sizes of the operand are read.
    """

    dims: tuple[Dim, ...]
    added: bool = False
    unread: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for dim in self.dims for name in dim.names)


@dataclass(frozen=True)
class Line:
    """A parsed rule.

    Attributes:
        text: the rule.
        operands: a term for each; None for ``...``: every operand and result has the dimensions ``dim*``.
        results: a term for each, or one for all.
        marks: factor -> its reduction.
        sizes: factor -> the argument that holds its size, or its size.
        shape: the argument that is the shape of the first result.
        linear: sets of (parameter, index): the index of a tensor in a list, None for all.
    """

    text: str
    operands: tuple[Term, ...] | None
    results: tuple[Term, ...]
    marks: Mapping[str, Reduction] = field(default_factory=dict)
    sizes: Mapping[str, str | int] = field(default_factory=dict)
    shape: str | None = None
    linear: tuple[tuple[tuple[str, int | None], ...], ...] = ()

    @functools.cached_property
    def starred(self) -> frozenset[str]:
        """Factors that stand for any number of dimensions."""
        terms = (*(self.operands or ()), *self.results)
        return frozenset(name for term in terms for dim in term.dims if dim.star for name in dim.names)


@functools.cache
def parse(text: str) -> Line:
    """Parse a rule.

    Raises:
        RuleSyntaxError: naming the token that does not fit, and where it is.
    """
    return _Parser(text).line()


class _Parser:
    """Parses one rule by recursive descent. Positions are those in the text; ``marks`` to ``starred`` are by factor."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [(match["token"], match.start("token")) for match in _TOKEN.finditer(text)]
        self.tokens.append(("", len(text)))
        self.next = 0  # index of the current token
        self.marks: dict[str, Reduction] = {}
        self.marked_at: dict[str, int] = {}  # position of the mark
        self.first_seen: dict[str, int] = {}  # position of the first use
        self.starred: dict[str, bool] = {}  # whether it is written with "*"

    @property
    def current(self) -> str:
        return self.tokens[self.next][0]

    @property
    def position(self) -> int:
        return self.tokens[self.next][1]

    def advance(self) -> str:
        """Consume the current token and return it."""
        self.next += 1
        return self.tokens[self.next - 1][0]

    def error(self, problem: str, position: int | None = None) -> RuleSyntaxError:
        return RuleSyntaxError(self.text, self.position if position is None else position, problem)

    def unexpected(self, expected: str) -> RuleSyntaxError:
        return self.error(f"{expected} is expected, not {repr(self.current) if self.current else 'the end'}")

    def accept(self, token: str) -> bool:
        """Consume the current token if it is this one; return whether it is."""
        if self.current != token or not token:
            return False
        self.next += 1
        return True

    def expect(self, token: str) -> None:
        """Consume this token; raise if the current one is another."""
        if not self.accept(token):
            raise self.unexpected(repr(token))

    def name(self, expected: str = "a factor") -> str:
        """Consume a name; ``expected`` describes it in errors."""
        if not _NAME.fullmatch(self.current):
            raise self.unexpected(expected)
        return self.advance()

    def line(self) -> Line:
        """Parse ``terms -> terms; clause; clause``, or ``...`` in place of the terms."""
        operands: tuple[Term, ...] | None = None
        results: tuple[Term, ...] = (Term((Dim((ANY_DIMENSION,), star=True),)),)
        if not self.accept("..."):
            operands = self.terms(operand=True)
            self.expect("->")
            results = self.terms(operand=False)
        if self.current and self.current != ";":
            raise self.unexpected("a factor, ',' or ';'" if operands is not None else "';'")
        names = {name for term in (*(operands or ()), *results) for name in term.names}
        sizes: dict[str, str | int] = {}
        shape: str | None = None
        linear: tuple[tuple[tuple[str, int | None], ...], ...] = ()
        while self.accept(";"):
            position = self.position
            keyword = self.name("'linear', 'shape' or a factor")
            if self.accept("="):
                if keyword not in names:
                    raise self.error(f"no term has the factor {keyword!r}", position)
                sizes[keyword] = int(self.advance()) if self.current.isdigit() else self.name("an argument or a number")
            elif keyword == "shape":
                shape = self.name("an argument")
            elif keyword == "linear":
                linear = self.linear_sets()
            else:
                raise self.unexpected(f"'=' after {keyword!r}")
        if self.current:
            raise self.unexpected("';'")
        self.check_reductions(results)
        return Line(self.text, operands, results, self.marks, sizes, shape, linear)

    def terms(self, *, operand: bool) -> tuple[Term, ...]:
        """Parse ``term, term``; a line without operands begins with the arrow."""
        if operand and self.current == "->":
            return ()
        terms = [self.term(operand=operand)]
        while self.accept(","):
            terms.append(self.term(operand=operand))
        return tuple(terms)

    def term(self, *, operand: bool) -> Term:
        """Parse ``()`` or dimensions; of an operand also ``_``, and ``+`` in front."""
        if operand and self.accept("_"):
            return Term((), unread=True)
        added = operand and self.accept("+")
        dims: list[Dim] = []
        if self.current == "(" and self.tokens[self.next + 1][0] == ")":
            self.next += 2
            return Term((), added)
        while self.current in {"(", "1"} or _NAME.fullmatch(self.current):
            position = self.position
            dims.append(self.dim())
            if dims[-1].star and sum(dim.star for dim in dims) > 1:
                raise self.error("a term can have one '*' only", position)
            if (dims[-1].optional or dims[-1].window) and not operand:
                raise self.error("a result lacks no dimension, and has no windows: '?' and '~' are for operands", position)
        return Term(tuple(dims), added)

    def dim(self) -> Dim:
        """Parse ``1``, ``(outer inner)``, ``name*`` or ``name~``, each but ``1`` also with ``?``."""
        if self.accept("1"):
            return Dim(())
        if self.accept("("):
            names = [self.factor(star=False)]
            while self.current != ")":
                names.append(self.factor(star=False))
            self.expect(")")
            optional = self.accept("?")
            return Dim(tuple(names), optional=optional)
        star = self.tokens[self.next + 1][0] == "*"
        name = self.factor(star=star)
        window = not star and self.accept("~")
        return Dim((name,), star, optional=self.accept("?"), window=window)

    def factor(self, *, star: bool) -> str:
        """Consume a factor with its marks, and remember these."""
        position = self.position
        name = self.name()
        if star:
            self.expect("*")
        if self.starred.setdefault(name, star) != star:
            raise self.error(f"the factor {name!r} is written with '*' in one place and without it in another", position)
        self.first_seen.setdefault(name, position)
        mark: Reduction | None = None
        if self.accept("!"):
            mark = "whole"
        elif self.accept(":"):
            if self.current not in get_args(Reduction):
                raise self.unexpected(f"one of {', '.join(get_args(Reduction))}")
            mark = self.advance()  # type: ignore[assignment]
        if mark is not None:
            if self.marks.setdefault(name, mark) != mark:
                raise self.error(f"the factor {name!r} is marked {self.marks[name]!r} and {mark!r}", position)
            self.marked_at[name] = position
        return name

    def linear_sets(self) -> tuple[tuple[tuple[str, int | None], ...], ...]:
        """Parse ``self other | tensors.0``: sets of (parameter, index of a tensor in its list)."""
        sets = [self.linear_set()]
        while self.accept("|"):
            sets.append(self.linear_set())
        return tuple(sets)

    def linear_set(self) -> tuple[tuple[str, int | None], ...]:
        """Parse one of them: ``self other``."""
        members: list[tuple[str, int | None]] = []
        while not members or _NAME.fullmatch(self.current):
            name, index = self.name("an argument"), None
            if self.accept("."):
                if not self.current.isdigit():
                    raise self.unexpected("the index of a tensor")
                index = int(self.advance())
            members.append((name, index))
        return tuple(members)

    def check_reductions(self, results: tuple[Term, ...]) -> None:
        """Check that each factor that may be cut is in all results, or in none and reduced."""
        for name, position in self.first_seen.items():
            n_results = sum(name in term.names for term in results)
            mark = self.marks.get(name)
            if mark == "whole":
                continue
            if n_results and mark is not None:
                raise self.error(f"{name!r} is in a result: it cannot be combined by {mark!r}", self.marked_at[name])
            if n_results not in (0, len(results)):
                raise self.error(f"{name!r} is in some results and not in others: mark it with '!'", position)
            if not n_results and mark is None and self.starred[name]:
                raise self.error(f"no result has {name!r}: mark it with how it is reduced, as in '{name}*:sum'", position)
