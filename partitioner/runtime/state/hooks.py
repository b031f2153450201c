"""Support hooks on the model, its parameters and the partitioned model as PyTorch does, or refuse them with an error that names them.

on the model                  forward (pre-)hooks of modules    run while the model is traced: what they do to values is in the graph
                              backward hooks of modules         refused
                              tensor hooks of parameters        called with the whole gradient, as on the model
                              post-accumulate hooks             refused: they are given the model's parameter
on a partitioned model, pm    forward and backward hooks        called by pm(...); train_step refuses
                              hooks of its parameters           called, where a process has the whole parameter; else refused
                              hooks of state_dict               refused
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.runtime.state.stored_parameters import StoredParameter
from passes.ir.errors import ConfigError, Place, first_few

TensorHooks = Mapping[str, tuple[Callable[[Tensor], Tensor | None], ...]]
"""Name of a parameter -> its hooks, in the order in which they are called."""

# Attribute in which a module keeps hooks -> name of their kind. PyTorch has no public interface for this.
_BACKWARD = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook"}
_FORWARD = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook"}
_LOAD = {"_load_state_dict_pre_hooks": "load_state_dict pre-hook", "_load_state_dict_post_hooks": "load_state_dict post-hook"}
_NOT_CALLED = {
    "train_step()": _FORWARD | _BACKWARD,
    "state_dict()": {"_state_dict_hooks": "state_dict hook", "_state_dict_pre_hooks": "state_dict pre-hook"},
    "load_state_dict()": _LOAD,
    "load_safetensors()": _LOAD,
}
"""Method of a partitioned model -> the hooks of it that the method does not call."""

_GLOBAL = {f"_global{place}": kind for place, kind in (_FORWARD | _BACKWARD).items()}

GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = tuple(getattr(torch.nn.modules.module, name) for name in _GLOBAL)
"""The tables of hooks that are registered for all modules; torch changes them in place."""

CALL_HOOKS = tuple(_FORWARD | _BACKWARD)
"""Attributes of a module that hold its forward and backward hooks."""


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has tensor hooks or post-accumulate hooks."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))  # noqa: SLF001


def tensor_hooks(model: nn.Module) -> TensorHooks:
    """Return the tensor hooks of the model's parameters.

    Raises:
        ConfigError: the model has hooks that a partitioned model cannot call.
    """
    refuse_global_hooks()
    for name, module in model.named_modules():
        for kind, hook in _hooks(module, _BACKWARD):
            raise ConfigError(
                f"the model has a {kind}, {_name(hook)}: the backward of a partitioned model does not pass through its modules",
                place=Place(module=name),
                remedy="remove it, or register it on a parameter: for name, p in pm.named_parameters(): p.register_hook(hook)",
            )
    hooks: dict[str, tuple[Callable[[Tensor], Tensor | None], ...]] = {}
    for name, parameter in model.named_parameters():
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            raise ConfigError(
                f"{name} has a post-accumulate hook, {_name(hook)}: it is given the model's parameter, and a partitioned model has its own",
                remedy=f'register it there: dict(pm.named_parameters())["{name}"].register_post_accumulate_grad_hook(hook)',
            )
        if parameter._backward_hooks:  # noqa: SLF001  # PyTorch has no public way to ask
            hooks[name] = tuple(parameter._backward_hooks.values())  # noqa: SLF001
    return hooks


def refuse_global_hooks() -> None:
    """Raise ConfigError where a hook is registered for all modules: a partitioned model does not call its modules."""
    for kind, hook in _hooks(torch.nn.modules.module, _GLOBAL):
        raise ConfigError(
            f"a {kind} is registered for all modules, {_name(hook)}: a partitioned model does not call the modules of the model",
            remedy="remove it (its handle has remove()), or register it on one module before the model is partitioned",
        )


def refuse_hooks(model: nn.Module, what: str) -> None:
    """Raise ConfigError where a partitioned model has hooks that ``what`` would not call.

    Args:
        what: ``"train_step()"``, ``"state_dict()"``, ``"load_state_dict()"`` or ``"load_safetensors()"``.
    """
    instead = "run pm(...) and .backward(), which calls it" if what == "train_step()" else "change the state dict yourself"
    for kind, hook in _hooks(model, _NOT_CALLED[what]):
        raise ConfigError(
            f"the partitioned model has a {kind}, {_name(hook)}, which {what} does not call", remedy=f"remove it, or {instead}"
        )


def refuse_parameter_hooks(parameters: Iterable[StoredParameter], *, in_no_sync: bool) -> None:
    """Raise ConfigError where a parameter has hooks that would get another gradient than on the model.

    Args:
        parameters: of this process.
        in_no_sync: whether ranks keep unsummed gradients.
    """
    for stored in parameters:
        if not has_hooks(stored.parameter):
            continue
        if stored.membership.is_part:
            raise ConfigError(
                f"{stored.name} has a hook, and this process has a part of it: the hook would see a part of the gradient",
                remedy='remove the hook, and change the gradient after the step; or keep parameters whole: mode="data" or "pipeline"',
            )
        if in_no_sync:
            raise ConfigError(
                f"{stored.name} has a hook, and inside no_sync() gradients are parts of sums",
                remedy="remove the hook, or run the step outside no_sync()",
            )


_WITHOUT_EFFECTS = frozenset({"torch", "transformers"})
"""Packages whose hooks change values alone: ``gradient_checkpointing_enable()`` has embeddings require gradients."""


def side_effect_note(model: nn.Module) -> str | None:
    """Return a note that side effects of the modules' forward hooks are not repeated; None if there are no hooks with any."""
    named = []
    for name, module in model.named_modules():
        named += [f"{name or '(the model itself)'} ({kind} {_name(hook)})" for kind, hook in _hooks(module, _FORWARD)]
    if not named:
        return None
    return (
        f"hooks run once, while the model is traced: {first_few(named, 4)}. What they do to values is part of the partitioned "
        "model; what else they do (print, store, count) is not repeated when it runs"
    )


def _hooks(owner: Any, kinds: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield kind and function of each hook in the attributes of ``owner`` that ``kinds`` names, without those of ``_WITHOUT_EFFECTS``."""
    for attribute, kind in kinds.items():
        for hook in getattr(owner, attribute, {}).values():
            function = inspect.unwrap(getattr(hook, "hook", hook))
            defined_in = getattr(function, "__module__", None) or type(function).__module__
            if defined_in.partition(".")[0] not in _WITHOUT_EFFECTS:
                yield kind, function


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__
