"""Does a saved state fit an optimizer? Options and entries of another kind, shape or dtype are refused by name."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from passes.ir.errors import ConfigError

__all__ = ["check_entries", "check_options"]

_HOW_IT_RUNS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize", "params", "param_names"})
"""Options that versions of torch have added, and that decide nothing about the state."""

_KIND = "decoupled_weight_decay"
"""The one option that is a kind: Adam with it is AdamW."""


def check_options(optimizer: Optimizer, group: int, options: Mapping[str, Any]) -> None:
    """Raise ConfigError where the options of a group are those of another kind of optimizer.

    Args:
        optimizer: that is to take over the state.
        group: number of its group.
        options: that were saved.
    """
    lacking = sorted(set(optimizer.defaults) - set(options) - _HOW_IT_RUNS - {_KIND})
    if lacking:
        raise _other_kind(optimizer, f"the options of its group {group} lack {', '.join(lacking)}")
    own = optimizer.param_groups[group].get(_KIND)
    if own is not None and options.get(_KIND, own) != own:
        raise _other_kind(optimizer, f"{_KIND} of its group {group} is {options[_KIND]}, and here {own}")


def check_entries(
    optimizer: Optimizer, name: str, entries: Mapping[str, Any], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise ConfigError where what was saved for a parameter is not what the optimizer keeps for one.

    Args:
        optimizer: that is to take over the state.
        name: of the parameter.
        entries: what was saved for it.
        options: of its group.
        shape: of the model's parameter.
        dtype: of the parameter.
    """
    entries = {what: value for what, value in entries.items() if value is not None}
    if not entries:
        return
    expected = _expected(optimizer, options, shape)
    if expected is not None and entries.keys() != expected.keys():
        lacking, more = sorted(expected.keys() - entries.keys()), sorted(entries.keys() - expected.keys())
        problem = f"lacks {', '.join(lacking)}" if lacking else f"has {', '.join(more)}"
        raise _other_kind(optimizer, f"the state of {name} {problem}")
    for what, value in entries.items():  # a counter of steps may be () in one and (1,) in the other
        found = tuple(value.shape) if isinstance(value, Tensor) else ()
        if expected is not None and found != expected[what] and math.prod(found) * math.prod(expected[what]) != 1:
            raise ConfigError(f"{what} of {name} has shape {found} in the state, and {expected[what]} in the optimizer")
        if isinstance(value, Tensor) and not torch.can_cast(value.dtype, dtype):
            raise ConfigError(f"{what} of {name} has dtype {value.dtype}, and the parameter {dtype}, which cannot hold its values")


def _expected(optimizer: Optimizer, options: Mapping[str, Any], shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]] | None:
    """What the optimizer keeps for a parameter -> of which shape; None: nobody knows before it has stepped.

    An optimizer of torch is asked by a step of another one like it, of a small parameter where the shapes do not depend on more.
    """
    kind: Any = type(optimizer)
    if kind.__module__.partition(".")[0] != "torch":
        return None
    taken = inspect.signature(kind).parameters
    plain = {name: value for name, value in options.items() if name in taken and name not in _HOW_IT_RUNS}
    known = tuple(sorted((name, _hashable(value)) for name, value in plain.items()))
    small = tuple(range(2, 2 + len(shape)))
    found = _kept_by(kind, known, small)
    if found is None or all(each in ((), small) for each in found.values()):
        return None if found is None else {what: shape if each == small else each for what, each in found.items()}
    return _kept_by(kind, known, shape)


def _hashable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def _kept_by(kind: Any, options: tuple[tuple[str, Any], ...], shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]] | None:
    """What an optimizer keeps for a parameter of this shape after a step."""
    probe = nn.Parameter(torch.ones(shape))
    probe.grad = torch.zeros(shape)
    try:
        optimizer = kind([probe], **dict(options))
        optimizer.step()
    except Exception:  # noqa: BLE001  one that wants a closure, or another kind of gradient: it cannot be asked
        return None
    kept = optimizer.state[probe].items()
    return {what: tuple(value.shape) if isinstance(value, Tensor) else () for what, value in kept if value is not None}


def _other_kind(optimizer: Optimizer, problem: str) -> ConfigError:
    return ConfigError(
        f"the state is not that of an optimizer of class {type(optimizer).__name__}: {problem}",
        remedy="load it into an optimizer of the class, and with the options, that it was saved from",
    )
