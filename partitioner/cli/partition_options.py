"""The options of ``partition`` on the command line, derived from its signature and docstring.

n_microbatches: int | None            --n-microbatches 4, --microbatches 4
training: bool | None                 --training, --eval
recompute: str | Mapping[str, str]    --recompute full, --recompute "layers.*=full"
constraints: Constraints              an option for each of its fields: --axes heads=tensor

The source is parsed and not imported, because importing it loads PyTorch, which ``--help`` does not need.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from partitioner.options.mode import mode_text, parse_mode
from passes.ir.errors import ConfigError

NOT_IN_TEXT: Mapping[str, str] = MappingProxyType(
    {
        "model": "the factory returns it",
        "example_inputs": "the factory returns them",
        "example_kwargs": "the factory returns them",
        "cost_model": "an object, such as measured times, has no text",
    }
)
"""Keyword of ``partition`` without an option -> the reason."""

_SPECIAL_FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType({"n_microbatches": ("--n-microbatches", "--microbatches")})
_SPECIAL_HELP: Mapping[str, str] = MappingProxyType(
    {
        "devices": "the number of ranks, or the device of each: cuda:0,cuda:1 "
        "(default: as many as --plan, --cluster or the mesh has, else all accelerators)",
        "cluster": "hardware to plan for when it is not the hardware that runs: kind, nodes and devices in each, as h100:8x8, "
        "or a TOML file that describes it",
        "plan": "lower the plan of this file, which plan --json wrote, instead of making one",
    }
)
"""Option -> help that replaces the docstring's, where a shell passes another kind of value than Python."""

_WIDTH = 60
_SHORT = 240
"""Characters of a help of several sentences."""


@dataclass(frozen=True)
class Keyword:
    """A parameter of a function, or a field of a dataclass.

    Attributes:
        name: of the parameter.
        annotation: source text of its type.
        default: its default value; None for a required one, and for one that is no constant.
        text: its description in the docstring.
    """

    name: str
    annotation: str
    default: Any
    text: str

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The members of the annotation's union."""
        return tuple(_members(ast.parse(self.annotation, mode="eval").body))

    @property
    def mapping(self) -> str | None:
        """The annotation of a mapping that it takes, or None."""
        return next((each for each in self.alternatives if each.startswith("Mapping[")), None)


def _members(node: ast.expr) -> list[str]:
    if isinstance(node, ast.BinOp):
        return [*_members(node.left), *_members(node.right)]
    return [ast.unparse(node)]


@cache
def keywords() -> tuple[Keyword, ...]:
    """Return the parameters of ``partition``."""
    function = _definition("partitioner", "partition")
    assert isinstance(function, ast.FunctionDef)
    texts = _described(ast.get_docstring(function) or "")
    parameters = function.args
    positional = list(zip(reversed(parameters.args), [*reversed(parameters.defaults), None], strict=False))
    found = [*reversed(positional), *zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)]
    return tuple(_keyword(each.arg, each.annotation, default, texts) for each, default in found)


@cache
def constraint_keywords() -> tuple[Keyword, ...]:
    """Return the fields of ``Constraints``."""
    kind = _definition("partitioner.options.constraints", "Constraints")
    texts = _described(ast.get_docstring(kind) or "")
    fields = [each for each in kind.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return tuple(_keyword(ast.unparse(each.target), each.annotation, each.value, texts) for each in fields)


def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Return the syntax tree of a function or class from the source of its module."""
    specification = importlib.util.find_spec(module)
    assert specification is not None
    assert specification.origin is not None
    body = ast.parse(Path(specification.origin).read_text(encoding="utf-8")).body
    return next(each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name)


def _keyword(name: str, annotation: ast.expr | None, default: ast.expr | None, texts: Mapping[str, str]) -> Keyword:
    assert annotation is not None, f"{name} has no type"
    value = ast.literal_eval(default) if isinstance(default, ast.Constant) else None
    return Keyword(name, ast.unparse(annotation), value, texts.get(name, ""))


def _described(docstring: str) -> dict[str, str]:
    """Return name -> description from the section ``Args:`` or ``Attributes:`` of a docstring."""
    _, _, section = re.sub(r"^(Args|Attributes):$", "\0", docstring, flags=re.MULTILINE).partition("\0")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


# -- options -----------------------------------------------------------------------------------------------------------------------


def flags_of(name: str) -> tuple[str, ...]:
    """Return the options of a keyword: ``("--memory-limit",)`` for ``memory_limit``."""
    return _SPECIAL_FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def add_partition_options(command: argparse.ArgumentParser) -> None:
    """Add an option for each keyword of ``partition``, and for each field of its constraints."""
    group = command.add_argument_group("options of partition")
    for keyword in keywords():
        if keyword.name == "constraints":
            for field in constraint_keywords():
                _add_option(group, field)
        elif keyword.name not in NOT_IN_TEXT:
            _add_option(group, keyword)


def _add_option(group: argparse._ArgumentGroup, keyword: Keyword) -> None:
    """Add the option of a keyword, of the kind that its type asks for."""
    flags, text = flags_of(keyword.name), _help(keyword)
    alternatives = keyword.alternatives
    if keyword.name == "training":
        group.add_argument("--training", action="store_true", default=None, help=text)
        group.add_argument("--eval", dest="training", action="store_false", default=None, help="plan for evaluation mode")
    elif alternatives[0] == "bool":
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif keyword.name == "mode":
        group.add_argument(*flags, metavar="MODE", help=text)
    elif keyword.mapping is not None:
        metavar = "NAME=VALUE" if len([each for each in alternatives if each != "None"]) == 1 else "VALUE"
        group.add_argument(*flags, action="append", metavar=metavar, help=text)
    elif alternatives[0] in ("int", "float") and "str" not in alternatives:
        group.add_argument(*flags, type=int if alternatives[0] == "int" else float, metavar="N", help=text)
    else:
        group.add_argument(*flags, metavar="FILE" if keyword.name == "plan" else keyword.name.rpartition("_")[2].upper(), help=text)


def _help(keyword: Keyword) -> str:
    """Return the help of an option: the docstring's description in the notation of a shell."""
    text = _SPECIAL_HELP.get(keyword.name)
    if text is None:
        text = re.sub(r"``(\{[^`]*\})``", lambda found: _shell_mapping(found[1]), keyword.text)
        text = text.replace('``""``', "an empty name").replace("`", "").replace('"', "")
        takes_none = "None" in (keyword.mapping or "")
        text = text.replace("None", "none") if takes_none else re.sub(r"\bNone\b:?", "default:", text)
        text = _first_sentences(text)
        text += f" (default: {keyword.default})" if keyword.default is not None else ""
    return textwrap.fill(text, _WIDTH).replace("%", "%%")


def _first_sentences(text: str) -> str:
    """Return the first sentence, and the next ones while they are short together."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z])", text)
    for sentence in others:
        if len(first) + len(sentence) > _SHORT:
            break
        first += f" {sentence}"
    return first.removesuffix(".")


def _shell_mapping(source: str) -> str:
    """Return a mapping of Python as a shell passes it: ``data=2,tensor=2``."""
    try:
        mapping = ast.literal_eval(source)
    except (SyntaxError, ValueError):
        return source
    return mode_text(mapping) if isinstance(mapping, dict) else source


# -- values ------------------------------------------------------------------------------------------------------------------------


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of ``partition`` that the options give, but for ``constraints`` and ``plan``.

    Raises:
        ConfigError: a value cannot be read.
    """
    plain = (keyword for keyword in keywords() if keyword.name not in (*NOT_IN_TEXT, "constraints", "plan"))
    return {each.name: _read(each, value) for each in plain if (value := getattr(arguments, each.name)) is not None}


def given_constraints(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``Constraints`` that the options give.

    Raises:
        ConfigError: a value cannot be read.
    """
    return {each.name: _read(each, value) for each in constraint_keywords() if (value := getattr(arguments, each.name)) is not None}


def _read(keyword: Keyword, value: Any) -> Any:
    """Return the value of an option as ``partition`` takes it. Its rules and types are checked there."""
    if keyword.name == "mode":
        return parse_mode(value)
    if keyword.name == "devices":
        return int(value) if re.fullmatch(r"-?\d+", value) else value.split(",")
    if isinstance(value, list):
        return _read_mapping(keyword, ",".join(value))
    return int(value) if isinstance(value, str) and value.isdecimal() and "int" in keyword.alternatives else value


def _read_mapping(keyword: Keyword, text: str) -> str | dict[str, Any]:
    """Read ``NAME=VALUE,NAME=VALUE``, or a plain value where the keyword takes one."""
    flag = flags_of(keyword.name)[0]
    mapping = keyword.mapping or ""
    if "=" not in text and any(each not in ("None", mapping) for each in keyword.alternatives):
        return text
    entries: dict[str, Any] = {}
    for entry in text.split(","):
        name, equals, value = entry.rpartition("=")
        if not equals or not value or name in entries:
            problem = f"names {name!r} twice" if name in entries else f"has {entry!r}, which gives no value to a name"
            raise ConfigError(f"{flag} {text} {problem}", remedy=f"give each name one value: {flag} NAME=VALUE,NAME=VALUE")
        entries[name] = _scalar(value, mapping)
    return entries


def _scalar(text: str, annotation: str) -> int | str | None:
    """Read a value of a mapping by the mapping's annotation: a number, ``none``, or text."""
    if text.lower() == "none" and "None" in annotation:
        return None
    return int(text) if re.fullmatch(r"-?\d+", text) and "int" in annotation else text
