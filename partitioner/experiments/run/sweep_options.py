"""The options of the placements of a sweep: keywords of ``partition``, each a value or a list of values to try."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from partitioner.api import partition
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.options.constraints import Constraints
from passes.ir.arguments.conform import conform, hints_of
from passes.ir.errors import ConfigError, did_you_mean

GRID: Mapping[str, str] = MappingProxyType(
    {
        "devices": "devices",
        "mode": "modes",
        "cluster": "clusters",
        "schedule": "schedules",
        "n_microbatches": "microbatches",
        "recompute": "recompute",
        "progress": "progress",
    }
)
"""Keyword of ``partition`` -> the argument of ``sweep`` for it."""

NOT_IN_SWEEPS: Mapping[str, str] = MappingProxyType(
    {
        "model": "models= gives it",
        "example_inputs": "the factory returns them",
        "example_kwargs": "the factory returns them",
        "plan": "a sweep makes plans",
        "cost_model": "a sweep simulates the machines of clusters=",
        "inputs": "a sweep has one process for all ranks",
    }
)
"""Keyword of ``partition`` that a sweep does not take -> the reason."""

OF_TRACE = ("training", "precision", "batch_dims")
"""Options that change the traced graph; all others change the plan."""

_PARAMETERS = inspect.signature(partition).parameters
_FIELDS = tuple(field.name for field in dataclasses.fields(Constraints))


def option_names() -> tuple[str, ...]:
    """Return the names of the options: keywords of ``partition``, and the fields of ``Constraints``."""
    keywords = (name for name in _PARAMETERS if name not in (*GRID, *NOT_IN_SWEEPS))
    return (*keywords, *_FIELDS)


def option_grid(options: Mapping[str, Any], beside: Collection[str] = ()) -> list[str]:
    """Return every combination of options, each as JSON of those that differ from the defaults: ``'{"precision": "bf16-mixed"}'``.

    Args:
        options: name -> value, or list of values. ``constraints`` is a ``Constraints``, a mapping of its fields, or such fields by
            themselves.
        beside: other names that the caller takes, for suggestions.

    Raises:
        ConfigError: an option is unknown, or does not take a value.
    """
    for name in options:
        _check_name(name, beside)
    names = [name for name in options if name not in _FIELDS]
    several = [[_checked(name, value) for value in _values(name, options[name])] for name in names]
    fields = [name for name in options if name in _FIELDS]
    if fields and "constraints" in options:
        raise ConfigError(f"constraints= and {fields[0]}= are both given", remedy=f"write {fields[0]} inside of constraints")
    if fields:
        names.append("constraints")
        by_field = [_listed(options[name]) for name in fields]
        several.append([_checked("constraints", dict(zip(fields, values, strict=True))) for values in itertools.product(*by_field)])
    return list(dict.fromkeys(_text(dict(zip(names, values, strict=True))) for values in itertools.product(*several)))


def _check_name(name: str, beside: Collection[str]) -> None:
    """Raise ConfigError for a name that is no option of a placement."""
    if name in option_names():
        return
    if name in NOT_IN_SWEEPS:
        raise ConfigError(f"a sweep takes no {name}: {NOT_IN_SWEEPS[name]}", remedy=f"leave out {name}")
    meant = did_you_mean(name, [*beside, *GRID, *option_names()], str)
    raise ConfigError(f"sweep() has no {name!r}", remedy=f"{meant}its options are those of partition: {', '.join(option_names())}")


def _values(name: str, value: Any) -> list[Any]:
    values = _listed(value)
    if not values:
        raise ConfigError(f"`{name}` is empty", remedy=f"pass {name}=[...], or leave it out")
    return values


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _checked(name: str, value: Any) -> Any:
    """Return a value of an option as ``partition`` takes it; raise ConfigError for one that it refuses."""
    if name == "constraints" and isinstance(value, Mapping):
        unknown = next((field for field in value if field not in _FIELDS), None)
        if unknown is not None:
            remedy = f"{did_you_mean(unknown, _FIELDS, str)}choose from {', '.join(_FIELDS)}"
            raise ConfigError(f"constraints have no {unknown!r}", remedy=remedy)
        value = Constraints(**value)
    if name == "batch_dims" and isinstance(value, Mapping):
        value = {key: None if dimension == "none" else dimension for key, dimension in value.items()}
    value = conform(value, hints_of(inspect.unwrap(partition))[name], name, example=EXAMPLES.get(name, ""))
    if value is not None and name in VALUES:
        VALUES[name](name, value)
    return value


def _text(options: Mapping[str, Any]) -> str:
    """Return options as JSON, without those that are left to their defaults; empty without any."""
    given = {name: _plain(value) for name, value in options.items() if value is not None and value != _PARAMETERS[name].default}
    return json.dumps(given, sort_keys=True, default=_name_of) if given else ""


def _plain(value: Any) -> Any:
    """Return constraints as a mapping of the fields that are given."""
    if isinstance(value, Constraints):
        return {name: field for name in _FIELDS if (field := getattr(value, name)) is not None}
    return dict(value) if isinstance(value, Mapping) else value


def _name_of(value: Any) -> Any:
    """Return a value that JSON does not have by its name: a dtype, a device, a split point."""
    return dict(value) if isinstance(value, Mapping) else str(getattr(value, "name", value)).removeprefix("torch.").lower()


def read_options(text: str) -> dict[str, Any]:
    """Return the keywords of ``partition`` that ``option_grid`` wrote."""
    options: dict[str, Any] = json.loads(text) if text else {}
    return options | ({"constraints": Constraints(**options["constraints"])} if "constraints" in options else {})
