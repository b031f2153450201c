"""The rule language: what lines mean, and that a line which cannot be read is refused at the token that is wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.ir.errors import ConfigError, VerificationError
from passes.rules.language import Dim, RuleSyntaxError, Term, parse
from passes.rules.registry import loops_of, register_rule
from passes.rules.validate import call_node, prove_rule


def test_a_line_is_read() -> None:
    line = parse("batch* (groups in), out in!, +out? -> batch* 1 (groups out); groups = n_groups; linear input | weight bias")
    batch = Dim(("batch",), star=True)
    assert line.operands == (
        Term((batch, Dim(("groups", "in")))),
        Term((Dim(("out",)), Dim(("in",)))),
        Term((Dim(("out",), optional=True),), added=True),
    )
    assert line.results == (Term((batch, Dim(()), Dim(("groups", "out")))),)
    assert line.marks == {"in": "whole"}
    assert line.sizes == {"groups": "n_groups"}
    assert line.linear == ((("input", None),), (("weight", None), ("bias", None)))


def test_clauses_and_marks_are_read() -> None:
    line = parse("_, a:max b' -> b', b'; shape size; a = 4; linear tensors.1 self")
    assert line.operands == (Term((), unread=True), Term((Dim(("a",)), Dim(("b'",)))))
    assert line.marks == {"a": "max"}
    assert (line.shape, line.sizes, line.linear) == ("size", {"a": 4}, ((("tensors", 1), ("self", None)),))
    assert parse("-> a").operands == ()
    assert parse("a, b ->").results == (Term(()),)
    assert parse("...; linear self").operands is None


@pytest.mark.parametrize(
    ("text", "wrong", "problem"),
    [
        ("a b, b c a c", "", "'->' is expected, not the end"),
        ("a b, b c => a c", "=", "'->' is expected, not '='"),
        ("a b -> a c! . d", ".", "a factor, ',' or ';' is expected, not '.'"),
        ("a (b -> a b", "->", "a factor is expected, not '->'"),
        ("a () -> a", ")", "a factor is expected, not ')'"),
        ("a* b* -> a*", "b*", "one '*' only"),
        ("a* b -> a b", "a b", "'*' in one place and without it"),
        ("a:mode -> ", "mode", "one of sum, mean, max, min, whole is expected, not 'mode'"),
        ("a! b, a:sum -> b", "a:sum", "marked 'whole' and 'sum'"),
        ("a b:max -> a b", "b:max", "in a result"),
        ("a b -> a b, a", "b -> a b, a", "in some results and not in others"),
        ("a* b -> b", "a* b -> b", "no result has 'a': mark it"),
        ("a -> a?", "a?", "a result lacks no dimension"),
        ("a -> a; b = n", "b = n", "no term has the factor 'b'"),
        ("a -> a; a = *", "*", "an argument or a number is expected"),
        ("a -> a; b", "", "'=' after 'b' is expected, not the end"),
        ("a -> a; linear", "", "an argument is expected"),
        ("a -> a; linear x.y", "y", "the index of a tensor is expected"),
        ("a 2 -> a", "2", "'->' is expected, not '2'"),
        ("a $ -> a", "$", "'->' is expected, not '$'"),
        ("... -> a", "->", "';' is expected"),
        ("", "", "'->' is expected, not the end"),
    ],
)
def test_the_wrong_token_is_shown(text: str, wrong: str, problem: str) -> None:
    with pytest.raises(RuleSyntaxError, match="cannot be read") as caught:
        parse(text)
    assert problem in str(caught.value)
    assert caught.value.position == (text.rindex(wrong) if wrong else len(text))
    shown, marked = str(caught.value).splitlines()[1:3]
    assert shown.strip() == text.strip()
    assert marked.index("^") - 4 == caught.value.position


TOKENS = ["->", ",", "+", "(", ")", "*", "!", "?", ":", ";", "=", "|", "_", ".", "...", "1", "7", "a", "b'", "max", "linear", "shape", "$"]


@given(st.lists(st.sampled_from(TOKENS), max_size=14), st.sampled_from(["", " "]))
def test_any_text_is_read_or_refused_at_a_place_in_it(tokens: list[str], between: str) -> None:
    text = between.join(tokens)
    try:
        parse(text)
    except RuleSyntaxError as error:
        position = error.position
    else:
        position = 0
    assert 0 <= position <= len(text)


NAMES = st.sampled_from(["rows", "columns", "in'", "x1"])
DIMS = st.one_of(st.tuples(NAMES), st.tuples(NAMES, NAMES), st.just(()))


@given(st.lists(st.lists(DIMS, max_size=4), min_size=1, max_size=3), st.lists(DIMS, max_size=4))
def test_what_is_written_is_what_is_read(operands: list[list[tuple[str, ...]]], result: list[tuple[str, ...]]) -> None:
    def written(dims: list[tuple[str, ...]]) -> str:
        return " ".join({0: "1", 1: dim[0] if dim else "", 2: f"({' '.join(dim)})"}[len(dim)] for dim in dims) or "()"

    line = parse(f"{', '.join(written(term) for term in operands)} -> {written(result)}")
    assert line.operands is not None
    assert [[dim.names for dim in term.dims] for term in line.operands] == operands
    assert [dim.names for dim in line.results[0].dims] == result


@torch.library.custom_op("rule_language::gated", mutates_args=())
def gated(x: torch.Tensor, gate: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return ``sum_c x[a, c] gate[c, b]``, gated."""
    return scale * x @ gate


GATED = torch.ops.rule_language.gated


def test_a_rule_of_ones_own_is_one_line() -> None:
    x, gate = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    register_rule(GATED, "rows in, in columns -> rows columns; linear x | gate")
    proof = prove_rule(GATED.default, x, gate, 2.0)
    assert proof.factors == ("rows", "in", "columns")
    assert proof.linear == (frozenset({0}), frozenset({1}))
    register_rule(GATED.default, "rows in!, in columns -> rows columns")
    assert prove_rule(GATED.default, x, gate).factors == ("rows", "columns")


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("rows in:max, in columns -> rows columns", "cut along in into 1, 4"),
        ("rows in:mean, in columns -> rows columns", "cut along in into 1, 4"),
        ("+rows in, in columns -> rows columns", "cut along in into 1, 4"),
        ("rows in, in columns -> rows columns; linear x gate", "linear in operands \\[0, 1\\]"),
        ("rows in!, _ -> rows columns!", "an operand is read"),
    ],
)
def test_a_rule_that_does_not_hold_is_found_by_execution(rule: str, problem: str) -> None:
    register_rule(GATED.default, rule)
    with pytest.raises(VerificationError, match=problem):
        prove_rule(GATED.default, torch.randn(4, 5, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64))


def test_a_rule_that_does_not_fit_its_operator_is_refused() -> None:
    with pytest.raises(ConfigError, match="has terms for 3 operands"):
        register_rule(GATED, "rows in, in columns, columns -> rows columns")
    with pytest.raises(ConfigError, match="names y, which the operator does not take"):
        register_rule(GATED, "rows in, in columns -> rows columns; linear y")
    with pytest.raises(ConfigError, match="is no operator"):
        register_rule(torch.matmul, "rows in, in columns -> rows columns")


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("rows in, in -> rows", "a tensor of 2 dimensions does not fit a term of 1"),
        ("rows in, rows columns -> in columns", "rows is 4 in one place and 5 in another"),
        ("(a b) in, in columns -> (a b) columns", "nothing says how 4 is divided into (a b)"),
        ("(a b) in, in columns -> (a b) columns; b = 3", "4 is no multiple of what is known of (a b)"),
        ("rows in, in columns -> columns rows", "columns is 6, but the result has 4"),
        ("rows in, in columns -> rows columns; rows = scale", "the argument 'scale' is no size"),
    ],
)
def test_a_rule_that_does_not_fit_a_call_is_refused(rule: str, problem: str) -> None:
    register_rule(GATED.default, rule)
    node = call_node(GATED.default, torch.randn(4, 5), torch.randn(5, 6), 1.5)
    with pytest.raises(ConfigError) as caught:
        loops_of(node)
    assert problem in str(caught.value)
    assert rule in str(caught.value)
