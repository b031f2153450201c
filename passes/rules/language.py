"""The language of rules: one line says what loops an operation is.

    batch* in, out in, +out -> batch* out; linear input | weight

Before the arrow stand the operands, one term for each tensor that the operator takes, behind it the results; a result term that stands
alone describes all results. A term lists dimensions by the factor (the loop) that runs over each.

    name            a factor; one that no result has is summed over (under a star, where it is marked so)
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
    _               an operand of which neither numbers nor sizes are read
    ...             (the whole rule before the semicolon) every operand and result is ``dim*``: elementwise with broadcasting

A dimension of an operand that has size one where the factor is larger is broadcast: nothing runs over it. An operand that may be absent
is absent in the call. Behind semicolons:

    groups = num_groups     the size of a factor is an argument; a part passes the size of its part
    inner = 16              the size of a factor
    shape size              an argument is the shape of the first result; a part passes the shape of its part
    linear self | other     operands, by parameter, in each of which the result is linear; ``linear self other``: in both together.
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

__all__ = ["ANY_DIMENSION", "Dim", "Line", "RuleSyntaxError", "Term", "parse"]

ANY_DIMENSION = "dim"
"""Factors of this name say nothing about what runs over them."""

_TOKEN = re.compile(r"\s*(?P<token>->|\.\.\.|[A-Za-z][A-Za-z0-9_]*'*|[0-9]+|[-,+()*?!:;=|_.~]|\S)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*'*")


class RuleSyntaxError(ConfigError):
    """A rule that cannot be read; shows the token."""

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
        star: whether it stands for any number of dimensions.
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
        unread: whether nothing of it is read.
    """

    dims: tuple[Dim, ...]
    added: bool = False
    unread: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for dim in self.dims for name in dim.names)


@dataclass(frozen=True)
class Line:
    """A rule that was read.

    Attributes:
        text: what was read.
        operands: a term for each; None when every operand and result has the dimensions ``dim*``.
        results: a term for each, or one for all.
        marks: factor -> how it is reduced.
        sizes: factor -> the argument that holds its size, or its size.
        shape: the argument that is the shape of the first result.
        linear: sets of parameters; with the index of a tensor in a list.
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
    """Read a rule.

    Raises:
        RuleSyntaxError: naming the token that does not fit, and where it is.
    """
    return _Reader(text).line()


class _Reader:
    """Reads one rule from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [(match["token"], match.start("token")) for match in _TOKEN.finditer(text)]
        self.tokens.append(("", len(text)))
        self.next = 0
        self.marks: dict[str, Reduction] = {}
        self.marked_at: dict[str, int] = {}
        self.first_seen: dict[str, int] = {}
        self.starred: dict[str, bool] = {}

    @property
    def current(self) -> str:
        return self.tokens[self.next][0]

    def error(self, problem: str, position: int | None = None) -> RuleSyntaxError:
        return RuleSyntaxError(self.text, self.tokens[self.next][1] if position is None else position, problem)

    def unexpected(self, wanted: str) -> RuleSyntaxError:
        return self.error(f"{wanted} is expected, not {repr(self.current) if self.current else 'the end'}")

    def accept(self, token: str) -> bool:
        if self.current != token or not token:
            return False
        self.next += 1
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.unexpected(repr(token))

    def name(self, wanted: str = "a factor") -> str:
        if not _NAME.fullmatch(self.current):
            raise self.unexpected(wanted)
        self.next += 1
        return self.tokens[self.next - 1][0]

    def number(self) -> int:
        self.next += 1
        return int(self.tokens[self.next - 1][0])

    def line(self) -> Line:
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
            keyword, position = self.name("'linear', 'shape' or a factor"), self.tokens[self.next - 1][1]
            if self.accept("="):
                if keyword not in names:
                    raise self.error(f"no term has the factor {keyword!r}", position)
                sizes[keyword] = self.number() if self.current.isdigit() else self.name("an argument or a number")
            elif keyword == "shape":
                shape = self.name("an argument")
            elif keyword == "linear":
                linear = self.linear_sets()
            else:
                raise self.unexpected(f"'=' behind {keyword!r}")
        if self.current:
            raise self.unexpected("';'")
        self.check_reductions(results)
        return Line(self.text, operands, results, self.marks, sizes, shape, linear)

    def terms(self, *, operand: bool) -> tuple[Term, ...]:
        if operand and self.current == "->":
            return ()
        found = [self.term(operand=operand)]
        while self.accept(","):
            found.append(self.term(operand=operand))
        return tuple(found)

    def term(self, *, operand: bool) -> Term:
        if operand and self.accept("_"):
            return Term((), unread=True)
        added = operand and self.accept("+")
        dims: list[Dim] = []
        if self.current == "(" and self.tokens[self.next + 1][0] == ")":
            self.next += 2
            return Term((), added)
        while self.current in {"(", "1"} or _NAME.fullmatch(self.current):
            position = self.tokens[self.next][1]
            dims.append(self.dim())
            if dims[-1].star and sum(dim.star for dim in dims) > 1:
                raise self.error("a term can have one '*' only", position)
            if (dims[-1].optional or dims[-1].window) and not operand:
                raise self.error("a result lacks no dimension, and has no windows: '?' and '~' are for operands", position)
        return Term(tuple(dims), added)

    def dim(self) -> Dim:
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
        position = self.tokens[self.next][1]
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
            mark = self.current  # type: ignore[assignment]
            self.next += 1
        if mark is not None:
            if self.marks.setdefault(name, mark) != mark:
                raise self.error(f"the factor {name!r} is marked {self.marks[name]!r} and {mark!r}", position)
            self.marked_at[name] = position
        return name

    def linear_sets(self) -> tuple[tuple[tuple[str, int | None], ...], ...]:
        sets = [self.linear_set()]
        while self.accept("|"):
            sets.append(self.linear_set())
        return tuple(sets)

    def linear_set(self) -> tuple[tuple[str, int | None], ...]:
        members: list[tuple[str, int | None]] = []
        while not members or _NAME.fullmatch(self.current):
            name, index = self.name("an argument"), None
            if self.accept("."):
                if not self.current.isdigit():
                    raise self.unexpected("the index of a tensor")
                index = self.number()
            members.append((name, index))
        return tuple(members)

    def check_reductions(self, results: tuple[Term, ...]) -> None:
        for name, position in self.first_seen.items():
            having = sum(name in term.names for term in results)
            mark = self.marks.get(name)
            if mark == "whole":
                continue
            if having and mark is not None:
                raise self.error(f"{name!r} is in a result: it cannot be combined by {mark!r}", self.marked_at[name])
            if having not in (0, len(results)):
                raise self.error(f"{name!r} is in some results and not in others: mark it with '!'", position)
            if not having and mark is None and self.starred[name]:
                raise self.error(f"no result has {name!r}: mark it with how it is reduced, as in '{name}*:sum'", position)
