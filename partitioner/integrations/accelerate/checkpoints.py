"""State dicts for frameworks that save on the first process what an optimizer or a model there tells, and load it on all.

with one_state(...):        every process: gathers what the first one saves
    framework saves         optimizer.state_dict(), model.state_dict(): what was gathered, without communication
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from partitioner.model.partitioned_model import PartitionedModel


def optimizer_state(pm: PartitionedModel, optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer, with that of all stages of a pipeline, under the names of parameters. All ranks must call it."""
    state: dict[str, Any]
    state = pm.full_optimizer_state_dict(_inner(optimizer)) if _is_in_stages(pm, optimizer) else optimizer.state_dict()
    return state


@contextlib.contextmanager
def gathered_state(**states: tuple[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Let ``state_dict()`` of models and optimizers return states that were gathered before.

    Args:
        states: any name -> a model or optimizer, and its state.
    """
    with contextlib.ExitStack() as stack:
        for owner, state in states.values():
            stack.enter_context(_replaced(owner, "state_dict", _returning(state)))
        yield


@contextlib.contextmanager
def loading_gathered_state(pm: PartitionedModel, optimizer: Any) -> Iterator[None]:
    """Let ``load_state_dict()`` of an optimizer take what ``optimizer_state`` returned, for this process's stages of a pipeline."""
    load = optimizer.load_state_dict

    def load_state_dict(state_dict: Mapping[str, Any]) -> None:
        names = [each for group in state_dict["param_groups"] for each in group["params"]]
        if names and all(isinstance(name, str) for name in names):
            pm.load_optimizer_state_dict(_inner(optimizer), state_dict)
        else:
            load(state_dict)

    with _replaced(optimizer, "load_state_dict", load_state_dict):
        yield


def _is_in_stages(pm: PartitionedModel, optimizer: Any) -> bool:
    """Return whether processes have different parameters, so that the state of an optimizer is that of one stage."""
    own = {id(parameter) for parameter in pm.parameters()}
    is_of_model = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    return is_of_model and len(pm.plan.stages) > 1


def _inner(optimizer: Any) -> Optimizer:
    """Return the optimizer of torch inside of accelerate's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


def _returning(state: Mapping[str, Any]) -> Any:
    def state_dict(*_args: Any, **_kwargs: Any) -> Mapping[str, Any]:
        return state

    return state_dict


@contextlib.contextmanager
def _replaced(owner: Any, name: str, method: Any) -> Iterator[None]:
    """Replace a method of one object."""
    before = owner.__dict__.get(name)
    owner.__dict__[name] = method
    try:
        yield
    finally:
        del owner.__dict__[name]
        if before is not None:
            owner.__dict__[name] = before
