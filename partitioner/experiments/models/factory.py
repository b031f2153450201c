"""Load a model by a text: ``net.py:factory`` names a function that returns it with its inputs, ``transformers:CONFIG.json`` a model."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from partitioner.experiments.models.transformers_config import transformers_model
from passes.ir.arguments.checked import bind
from passes.ir.errors import ConfigError, PartitionError, Place

TRANSFORMERS = "transformers"
"""The name before the colon of a configuration of transformers."""

_HOW = "name a file or module and a function in it: net.py:factory, package.module:factory, or transformers:CONFIG.json"
_LITERALS = 'write numbers, texts, lists and the like: "net.py:factory(depth=8, widths=[64, 128])"'
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MODULE = "factory_file"
"""The name of the file as a module: its own name may be that of another module."""


class FactoryResult(NamedTuple):
    """A model with its example inputs.

    Attributes:
        model: the module.
        args: positional inputs of one call; None: to be inferred from the model.
        kwargs: keyword inputs.
    """

    model: nn.Module
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]


def call_factory(text: str, given: Mapping[str, Any] = _NOTHING) -> FactoryResult:
    """Return the model that a text names, with its inputs.

    Args:
        text: ``net.py:factory``, which may import modules of its folder like a script, ``package.module:factory``, either with arguments,
            ``net.py:factory(depth=8)``, or ``transformers:CONFIG.json``.
        given: keyword arguments beside those of the text.

    Raises:
        ConfigError: there is no such file, module or function, it fails, or it does not return a model with its inputs.
    """
    source, args, kwargs = _split_arguments(text)
    twice = next((name for name in given if name in kwargs), None)
    if twice is not None:
        raise ConfigError(f"{text} and --{twice} both give {twice}", remedy="give it once")
    kwargs = {**kwargs, **given}
    where, _, name = source.rpartition(":")
    if where == TRANSFORMERS:
        _check_fits(transformers_model, text, args, kwargs, n_before=1)
        return FactoryResult(*transformers_model(name, *args, **kwargs))
    if not where or not name:
        raise ConfigError(f"{text!r} names no factory", remedy=_HOW)
    module = _load(where)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise ConfigError(f"{where} has no {name!r}", remedy=f"its functions are {', '.join(functions)}" if functions else _HOW)
    factory = getattr(module, name)
    if not callable(factory):
        raise ConfigError(f"{name!r} in {where} is no function, but {_kind(factory)}", remedy=_HOW)
    _check_fits(factory, text, args, kwargs)
    with _errors_of_file(f"{name}()", module.__file__ or where, where):
        made = factory(*args, **kwargs)
    return check_factory_result(name, made)


def source_name(text: str) -> str:
    """Return a short name of the model that a text names.

    >>> [source_name(text) for text in ("net.py:gpt", "net.py:factory(depth=8)", "transformers:llama.json", "models.unet:main")]
    ['gpt', 'net(depth=8)', 'llama', 'unet']
    """
    source = _split_arguments(text)[0]
    where, _, name = source.rpartition(":")
    if where == TRANSFORMERS:
        short = Path(name).stem
    elif name in ("factory", "main"):
        short = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    else:
        short = name
    return (short or source) + text[len(source) :]


def relative_to(text: str, folder: Path) -> str:
    """Return the text of a model whose file is relative to a folder; modules are not."""
    source, *_ = _split_arguments(text)
    where, _, name = source.rpartition(":")
    arguments = text[len(source) :]
    if where == TRANSFORMERS:
        return f"{TRANSFORMERS}:{folder / name}{arguments}"
    return text if _names_module(where) else f"{folder / source}{arguments}"


def _split_arguments(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the factory of a text without its arguments, and the arguments: ``("net.py:factory", [], {"depth": 8})``.

    Raises:
        ConfigError: an argument is no literal.
    """
    if not text.endswith(")"):
        return text, [], {}
    for start in (index for index, character in enumerate(text) if character == "("):
        with contextlib.suppress(SyntaxError):
            call = ast.parse(f"_{text[start:]}", mode="eval").body
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                return text[:start], [_literal(text, each) for each in call.args], _keywords(text, call)
    raise ConfigError(f"the arguments of {text!r} cannot be read", remedy=_LITERALS)


def _keywords(text: str, call: ast.Call) -> dict[str, Any]:
    if any(each.arg is None for each in call.keywords):
        raise ConfigError(f"{text} has ** among its arguments", remedy=_LITERALS)
    return {str(each.arg): _literal(text, each.value) for each in call.keywords}


def _literal(text: str, node: ast.expr) -> Any:
    """Return the value of an argument; nothing is evaluated but literals."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{ast.unparse(node)} in {text} is no literal", remedy=_LITERALS) from error


def _check_fits(factory: Callable[..., Any], text: str, args: Sequence[Any], kwargs: Mapping[str, Any], n_before: int = 0) -> None:
    """Raise ConfigError if a factory does not take these arguments, after ``n_before`` others."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a builtin without one
        return
    bind(text, signature.replace(parameters=list(signature.parameters.values())[n_before:]), args, kwargs)


def _names_module(where: str) -> bool:
    """Return whether a text is the name of a module, and not of a file."""
    return not where.endswith(".py") and not Path(where).is_file() and all(part.isidentifier() for part in where.split("."))


def _load(where: str) -> ModuleType:
    """Import a module by its name, or a file."""
    if not _names_module(where):
        return _load_file(where)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as python -m does
    if where in sys.modules:
        return sys.modules[where]
    with _errors_of_file(where, where, where):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(f"there is no module {error.name}", remedy=_HOW) from error


def _load_file(path: str) -> ModuleType:
    """Import a file as the module ``_MODULE``; its folder is added to ``sys.path``."""
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}", remedy=_HOW)
    specification = importlib.util.spec_from_file_location(_MODULE, path)
    if specification is None or specification.loader is None:
        raise ConfigError(f"{path} is no Python file", remedy=_HOW)
    module = importlib.util.module_from_spec(specification)
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    with _errors_of_file(path, path, path):
        specification.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _errors_of_file(what: str, path: str, shown: str) -> Iterator[None]:
    """Wrap errors of the user's file, with the line of the file that raised it or called what raised it; ``shown`` is its name there."""
    try:
        yield
    except PartitionError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends its process has not made a model
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == Path(path).resolve()]
        line = frames[-1].lineno if frames else None
        if isinstance(error, SyntaxError):
            line = error.lineno
        raise ConfigError(
            f"{what} failed: {type(error).__name__}: {error}",
            place=None if line is None else Place(source=f"{shown}:{line}"),
            remedy="--debug shows the whole traceback",
        ) from error


def check_factory_result(name: str, made: object) -> FactoryResult:
    """Check that the factory ``name`` returned ``(model, args)`` or ``(model, args, kwargs)``.

    Raises:
        ConfigError: it returned something else.
    """
    values = made if isinstance(made, tuple) else ()
    types = (nn.Module, tuple, Mapping)[: max(len(values), 2)]
    if len(values) == len(types) and all(map(isinstance, values, types)):
        return FactoryResult(values[0], values[1], values[2] if len(values) == 3 else {})
    returned = f"({', '.join(type(value).__name__ for value in values)})" if isinstance(made, tuple) else _kind(made)
    raise ConfigError(
        f"{name}() returned {returned}",
        remedy="return (model, args) or (model, args, kwargs): a module, a tuple and a dict, as in return model, (x,)",
    )


def _kind(value: object) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"
