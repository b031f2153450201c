"""Use a model as a training script does, and note everything that the script can see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from partitioner import PartitionedModel, PartitionError
from tests.fuzz.programs.losses import kept_value, loss_function
from tests.fuzz.programs.program import Program, make_inputs
from tests.fuzz.programs.structures import leaves_of, plain
from tests.fuzz.running.comparison import REFUSED, disturb, has_gradient
from tests.fuzz.running.precision import autocast

Inputs = tuple[tuple[Any, ...], dict[str, Any], Tensor]
"""Positional inputs, keyword inputs and the target."""


@dataclass
class Reference:
    """One side of a comparison: the model, or what ``partition`` made of it.

    Attributes:
        module: this side's.
        is_partitioned: whether it is what ``partition`` made.
        noise: by how much inputs differ from the program's.
        draw: of the noise.
        seed: added to the seed of every call.
        calls_backward: whether ``pm(x)`` is trained by ``backward``, or by ``train_step`` alone.
        trains: whether the loss has a gradient.
        precision: in which the unpartitioned model computes.
    """

    module: nn.Module
    is_partitioned: bool
    noise: float = 0.0
    draw: int = 1
    seed: int = 0
    calls_backward: bool = True
    trains: bool = True
    precision: str | None = None

    def inputs(self, program: Program, rows: int, *, is_switched: bool | None = None) -> Inputs:
        """Return the program's inputs, and its target; those of the first call where it is not said which."""
        is_switched = program.usage.starts_switched if is_switched is None else is_switched
        args, kwargs, target = make_inputs(program, rows, is_switched=is_switched)
        disturb([each for each in leaves_of([args, kwargs]) if isinstance(each, Tensor)], self.noise, self.draw)
        return args, kwargs, target

    def start(self, seed: int) -> None:
        """Seed what a call draws."""
        torch.manual_seed(seed + self.seed)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call."""
        with contextlib.nullcontext() if self.is_partitioned else autocast(self.precision):
            return self.module(*args, **kwargs)

    @property
    def partitioned(self) -> PartitionedModel:
        assert isinstance(self.module, PartitionedModel)
        return self.module

    def step(self, program: Program, inputs: Inputs) -> Tensor:
        """Run one training step: return the loss, and leave gradients on the parameters."""
        args, kwargs, target = inputs
        loss_fn = loss_function(program, self.module)
        self.start(1)
        if self.is_partitioned:
            loss: Tensor = self.partitioned.train_step(*args, target=target, loss_fn=loss_fn, **kwargs)
            return loss
        with autocast(self.precision):
            loss = loss_fn(self.module(*args, **kwargs), target)
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor | None]:
        """Return copies of the gradients by original names."""
        if self.is_partitioned:
            return _copied(self.partitioned.full_gradients())
        return _copied({name: parameter.grad for name, parameter in self.module.named_parameters()})

    def state(self) -> dict[str, Tensor | None]:
        """Return a copy of the state by original names."""
        return _copied(self.partitioned.full_state_dict() if self.is_partitioned else self.module.state_dict())

    def buffers(self) -> dict[str, Tensor | None]:
        """Return copies of the buffers; of a partitioned model the whole state, for it does not say which are buffers."""
        names = {name for name, _ in self.module.named_buffers()} if not self.is_partitioned else None
        return {name: value for name, value in self.state().items() if names is None or name in names}

    def kept(self, program: Program) -> dict[str, Any]:
        """Return copies of the tensors that the last call kept on modules; a name if it is missing or refused (after a step)."""
        found: dict[str, Any] = {}
        for place in program.usage.kept:
            try:
                found[place] = _detached(kept_value(self.module, place))
            except PartitionError:
                found[place] = REFUSED
            except (AttributeError, KeyError, IndexError, TypeError):
                found[place] = "nothing"
        return found

    def turn_parameters(self, program: Program) -> None:
        """Unfreeze what was frozen at first, and freeze what is frozen later."""
        for name, parameter in self.module.named_parameters():
            if name in program.usage.frozen_later or name in program.usage.frozen:
                parameter.requires_grad_(name in program.usage.frozen)


def observations(side: Reference, program: Program) -> Iterator[tuple[str, Any]]:
    """Yield the observations of one side in order."""
    usage, first = program.usage, program.usage.starts_switched
    yield from _call(side, program, first, "")
    if usage.switch is not None:
        yield from _call(side, program, not first, " of the other call")
    if side.trains:
        yield from _steps(side, program)
    if usage.switch is not None:
        yield from _call(side, program, first, " of the first call again")
    yield "state", side.state()
    if any(each.is_written for each in program.inputs):
        yield from _calls_with_written_arguments(side, program)
    args, kwargs, _ = side.inputs(program, program.other_rows)
    side.start(2)
    if not side.is_partitioned:
        yield "output of another batch", _detached(side.call(args, kwargs))
        return
    try:
        yield "output of another batch", _detached(side.call(args, kwargs))
    except PartitionError:
        yield "output of another batch", None


def _call(side: Reference, program: Program, is_switched: bool, label: str) -> Iterator[tuple[str, Any]]:
    """Run one call, and its backward."""
    args, kwargs, target = inputs = side.inputs(program, program.rows, is_switched=is_switched)
    differentiable = _differentiable(program, inputs)
    if program.seed % 2:
        for each in differentiable:
            each.requires_grad_()
    side.start(0)
    with torch.set_grad_enabled(side.calls_backward):
        output = side.call(args, kwargs)
    yield f"output{label}", _detached(output)
    yield f"arguments after a call{label}", _written(program, inputs)
    yield f"kept tensors after a call{label}", side.kept(program)
    yield "buffers after a call", side.buffers()
    if not side.calls_backward:
        return
    loss = loss_function(program, side.module)(output, target)
    yield f"loss of a call{label}", loss.detach()
    if loss.requires_grad:
        loss.backward()
    yield f"gradients of parameters{label}", side.gradients()
    yield f"gradients of inputs{label}", [each.grad for each in differentiable]
    side.module.zero_grad()


def _steps(side: Reference, program: Program) -> Iterator[tuple[str, Any]]:
    """Run steps with an update between them, then two whose gradients add up."""
    inputs = side.inputs(program, program.rows)
    yield "loss of train_step", side.step(program, inputs)
    yield "gradients of train_step", side.gradients()
    yield "arguments after train_step", _written(program, inputs)
    yield "kept tensors after train_step", side.kept(program)
    torch.optim.SGD(side.module.parameters(), lr=0.01).step()
    side.module.zero_grad()
    side.turn_parameters(program)
    inputs = _next_inputs(inputs)
    yield "loss of a second step", side.step(program, inputs)
    yield "gradients of a second step", side.gradients()
    yield "arguments after a second step", _written(program, inputs)
    if program.usage.switch is None:
        inputs = _next_inputs(inputs)
    else:
        inputs = side.inputs(program, program.rows, is_switched=not program.usage.starts_switched)
    side.step(program, inputs)
    yield "gradients of two steps", side.gradients()
    side.module.zero_grad()


def _calls_with_written_arguments(side: Reference, program: Program) -> Iterator[tuple[str, Any]]:
    """Yield two calls without gradients, the second with the tensors that the first has changed."""
    args, kwargs, _ = inputs = side.inputs(program, program.rows)
    for label in ("", " a second time"):
        side.start(3)
        with torch.no_grad():  # not while a caller compares, which may run the reference again
            output = side.call(args, kwargs)
        yield f"output without gradients{label}", _detached(output)
        yield f"arguments after a call without gradients{label}", _written(program, inputs)


def _next_inputs(inputs: Inputs) -> Inputs:
    """Return the inputs with their written values, without the history that a call gives to written ones."""
    for each in leaves_of([inputs[0], inputs[1]]):
        if isinstance(each, Tensor) and each.grad_fn is not None:
            each.detach_()
    return inputs


def _named(program: Program, inputs: Inputs) -> Mapping[str, Any]:
    args, kwargs, _ = inputs
    return dict(zip([each.name for each in program.inputs if not each.keyword], args, strict=True)) | kwargs


def _written(program: Program, inputs: Inputs) -> dict[str, Any]:
    """Return copies of the arguments that forward may write into."""
    named = _named(program, inputs)
    return {each.name: _detached(named[each.name]) for each in program.inputs if each.is_written and each.name in named}


def _differentiable(program: Program, inputs: Inputs) -> list[Tensor]:
    """Return the tensors of arguments that have gradients."""
    named = _named(program, inputs)
    found = [leaf for each in program.inputs if not each.is_written and each.name in named for leaf in leaves_of(named[each.name])]
    return [each for each in found if isinstance(each, Tensor) and has_gradient(each)]


def _detached(value: Any) -> Any:
    """Return a copy of the tensors of a value, dataclasses as dicts."""
    return tree_map_only(Tensor, lambda each: each.detach().clone(), plain(value))


def _copied(values: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the values as they are now."""
    return {name: None if value is None else value.detach().clone() for name, value in values.items()}
