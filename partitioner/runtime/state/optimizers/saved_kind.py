"""Check that a saved state fits an optimizer; errors name options and entries of another kind, shape or dtype."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partitioner.runtime.state.optimizers.whole_states import updating_class
from passes.ir.errors import ConfigError

_HOW_IT_RUNS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize", "params", "param_names"})
"""Options that versions of torch have added, and that do not affect the state."""

_KIND = "decoupled_weight_decay"
"""An option that distinguishes optimizers: Adam with it is AdamW."""


def check_options(optimizer: Optimizer, group: int, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``options``, saved for parameter group number ``group``, are those of another kind of optimizer."""
    lacking = sorted(set(optimizer.defaults) - set(options) - _HOW_IT_RUNS - {_KIND})
    if lacking:
        raise _other_kind(optimizer, f"the options of its group {group} lack {', '.join(lacking)}")
    own = optimizer.param_groups[group].get(_KIND)
    if own is not None and options.get(_KIND, own) != own:
        raise _other_kind(optimizer, f"{_KIND} of its group {group} is {options[_KIND]}, and here {own}")


def check_entries(
    optimizer: Optimizer, name: str, entries: Mapping[str, Any], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise ConfigError if the entries saved for a parameter are not those that the optimizer has for one.

    Args:
        optimizer: loads the state.
        name: of the parameter.
        entries: the saved ones.
        options: of its group.
        shape: of the model's parameter.
        dtype: of the parameter.
    """
    entries = {what: value for what, value in entries.items() if value is not None}
    if not entries:
        return
    expected = _expected_shapes(optimizer, options, shape)
    if expected is not None and entries.keys() != expected.keys():
        lacking, extra = sorted(expected.keys() - entries.keys()), sorted(entries.keys() - expected.keys())
        problem = f"lacks {', '.join(lacking)}" if lacking else f"has {', '.join(extra)}"
        raise _other_kind(optimizer, f"the state of {name} {problem}")
    for what, value in entries.items():
        saved = tuple(value.shape) if isinstance(value, Tensor) else ()
        both_scalar = expected is not None and math.prod(saved) * math.prod(expected[what]) == 1  # step counts may be () or (1,)
        if expected is not None and saved != expected[what] and not both_scalar:
            raise ConfigError(f"{what} of {name} has shape {saved} in the state, and {expected[what]} in the optimizer")
        if isinstance(value, Tensor) and not torch.can_cast(value.dtype, dtype):
            raise ConfigError(f"{what} of {name} has dtype {value.dtype}, and the parameter {dtype}, which cannot hold its values")


def _expected_shapes(optimizer: Optimizer, options: Mapping[str, Any], shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]] | None:
    """Return name -> shape of each state entry of a parameter; None if they are unknown before the optimizer's first step.

    They are found by a step of another instance, on a small parameter; on one of ``shape`` if entries have shapes other than its own.
    """
    kind: Any = updating_class(optimizer)
    if kind.__module__.partition(".")[0] != "torch":
        return None
    accepted = inspect.signature(kind).parameters.keys() - _HOW_IT_RUNS
    arguments = tuple(sorted((name, _hashable(value)) for name, value in options.items() if name in accepted))
    small = tuple(range(2, 2 + len(shape)))
    small_shapes = _shapes_after_step(kind, arguments, small)
    if small_shapes is None:
        return None
    if all(entry in ((), small) for entry in small_shapes.values()):
        return {what: shape if entry == small else entry for what, entry in small_shapes.items()}
    return _shapes_after_step(kind, arguments, shape)


def _hashable(value: Any) -> Any:
    """Return an option as a key of a cache: the number of a tensor, and a list as a tuple."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def _shapes_after_step(kind: Any, options: tuple[tuple[str, Any], ...], shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]] | None:
    """Return name -> shape of each state entry of a parameter of this shape after a step; None if the step fails."""
    probe = nn.Parameter(torch.ones(shape))
    probe.grad = torch.zeros(shape)
    try:
        optimizer = kind([probe], **dict(options))
        optimizer.step()
    except (RuntimeError, TypeError, ValueError):  # it needs a closure, or another kind of gradient or parameter
        return None
    entries = optimizer.state[probe].items()
    return {what: tuple(value.shape) if isinstance(value, Tensor) else () for what, value in entries if value is not None}


def _other_kind(optimizer: Optimizer, problem: str) -> ConfigError:
    return ConfigError(
        f"the state is not that of an optimizer of class {updating_class(optimizer).__name__}: {problem}",
        remedy="load it into an optimizer of the class, and with the options, that it was saved from",
    )
