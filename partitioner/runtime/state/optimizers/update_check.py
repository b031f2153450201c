"""Refuse an optimizer step whose update would differ from that of the unpartitioned model.

An optimizer reads for the update of an element

    "elements"      that element alone (SGD, AdamW, ...)      right on any part of a parameter
    "parameters"    the rest of its parameter (Adafactor)     right where this process has the whole parameter
    "model"         all parameters (L-BFGS)                   right where this process has the whole model; so for unknown classes
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partitioner.runtime.state.gradient_slots import is_unsummed
from partitioner.runtime.state.stored_parameters import Membership, membership
from passes.ir.errors import ConfigError

Reads = Literal["elements", "parameters", "model"]
"""Values that an optimizer reads to update one element of a parameter."""

Kind = TypeVar("Kind", bound=type[Optimizer])

optim = torch.optim
_READS: dict[Callable[..., Any], Reads] = {}
"""``step`` of a class of optimizers -> what it reads."""


def register_optimizer(kind: Kind, reads: Reads) -> Kind:
    """Declare what a class of optimizers reads, so that it may update parameters of which a process holds a part.

    Args:
        kind: the class; subclasses with the same ``step`` are of the same kind.
        reads: ``"elements"``: the update of an element depends on the gradient, value and state of that element alone;
            ``"parameters"``: on those of the whole parameter, of no other; ``"model"``: on those of other parameters, too.

    Raises:
        ConfigError: it is no class of optimizers, or there is no such kind.
    """
    given: object = kind
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise ConfigError(f"{kind!r} is no class of optimizers", remedy="pass a subclass of torch.optim.Optimizer")
    if reads not in ("elements", "parameters", "model"):
        raise ConfigError(f"there is no reads={reads!r}", remedy='choose "elements", "parameters" or "model"')
    _READS[_step(kind)] = reads
    return kind


def reads_of(kind: type[Optimizer]) -> Reads | None:
    """Return the inputs of an update that a class of optimizers reads; None if they are not declared."""
    return _READS.get(_step(kind))


def _step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the ``step`` that a class defines, without the wrapper that torch adds when its first instance is created."""
    step: Callable[..., Any] = inspect.unwrap(kind.step)
    return step


_KINDS: dict[Reads, tuple[type[Optimizer], ...]] = {
    "elements": (
        *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.SparseAdam),
        *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
    ),
    "parameters": (optim.Adafactor, optim.Muon),
    "model": (optim.LBFGS,),
}

for _reads, _kinds in _KINDS.items():
    for _kind in _kinds:
        register_optimizer(_kind, _reads)


@functools.cache
def check_optimizers() -> None:
    """Register a hook, once, that checks every optimizer of a partitioned model's parameters before its steps."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check those parameters of an optimizer that belong to a partitioned model; its gradients after a closure, which computes them.

    Returns:
        The arguments of ``step`` with a closure that checks them; None if there is no closure.
    """
    for number, group in enumerate(optimizer.param_groups):
        memberships = [member for parameter in group["params"] if (member := membership(parameter)) is not None]
        for member in memberships:
            _check_kind(optimizer, member)
        _check_parts(number, memberships)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _check_sums(optimizer)
        return None

    def checked() -> Any:
        loss = closure()
        _check_sums(optimizer)
        return loss

    return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})


def _check_sums(optimizer: Optimizer) -> None:
    """Raise ConfigError if a gradient of an optimizer's parameters is this rank's term of a sum."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            member = membership(parameter)
            if member is not None:
                _check_sum(parameter, member)


def _check_kind(optimizer: Optimizer, member: Membership) -> None:
    """Raise ConfigError if the optimizer reads more than this process has, so that its update would not be that of the model."""
    kind = type(optimizer)
    reads = reads_of(kind)
    if reads == "elements" or member.has_all or (reads == "parameters" and not member.is_part):
        return
    here = 'run all ranks in one process (without torchrun), where parameters are whole; or use mode="data"'
    if reads == "parameters":
        problem = f"{kind.__name__} reads whole parameters, and this process has a part of {member.name}"
        remedy = (
            f"partitioner.OwnerOptimizer(parameters, {kind.__name__}, lr=...) updates each parameter whole, on a rank that owns it; "
            f'or {here} or "pipeline", which keep them whole; or take an optimizer that works element by element, as AdamW does'
        )
    elif reads == "model":
        problem, remedy = f"{kind.__name__} reads all parameters at once, and this process has a part of the model", here
    else:
        problem = f"{kind.__name__} may read several elements or parameters at once, and this process has a part of the model"
        remedy = f'{here}; or, if it reads less, say so: partitioner.register_optimizer({kind.__name__}, "elements"), or "parameters" '
        remedy += f"for partitioner.OwnerOptimizer(parameters, {kind.__name__}, ...), which updates each parameter whole"
    raise ConfigError(f"{problem}: its update would not be that of the model", remedy=remedy)


def _check_sum(parameter: Tensor, member: Membership) -> None:
    """Raise ConfigError if the gradient is this rank's term of a sum (``no_sync``)."""
    if is_unsummed(parameter):
        raise ConfigError(
            f"the gradient of {member.name} is this rank's part of a sum: every step since it was cleared ran in no_sync(), and copies of "
            "the parameter on other ranks would be updated by other gradients",
            remedy="run the last step of an accumulation outside no_sync()",
        )


def _check_parts(number: int, memberships: list[Membership]) -> None:
    """Raise ConfigError if parameter group ``number`` has only some shards of a parameter of this process."""
    for member, count in Counter(memberships).items():
        if count < member.n_parts:
            raise ConfigError(
                f"{member.name} is in {member.n_parts} parts on several devices, and group {number} of the optimizer has {count} of them",
                remedy="put all into one group: [p for name, p in pm.named_parameters() if ...] has every part under the one name, "
                "and a dict of them keeps the last alone",
            )
