"""Find which of two gradients is the derivative of a loss: some kernels of PyTorch compute others for unusual layouts in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tests.fuzz.programs.losses import loss_function
from tests.fuzz.programs.program import Program, make_inputs
from tests.fuzz.programs.structures import leaves_of
from tests.fuzz.running.comparison import as_real, has_gradient

STEP = 1e-6
"""Of a difference quotient, in float64: its error is about 1e-9."""

TOLERANCE = 1e-5
"""Relative to the length of the gradient."""

Gradients = Mapping[str, Tensor | None] | Sequence[Tensor | None]
"""Of parameters, by name; or of the inputs that have gradients, in their order."""


def is_fault_of_model(program: Program, model: nn.Module, wanted: Gradients, got: Gradients) -> bool:
    """Return whether the model's own gradient is not the derivative of its loss in a random direction, and the other gradient is.

    Args:
        wanted: the gradient that PyTorch computes for the unpartitioned model.
        got: the gradient that is compared with it.
    """
    of_inputs = not isinstance(wanted, Mapping)
    variables = _inputs(program)[2] if of_inputs else list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in variables]
    high, low = (_loss(program, model, direction, step, of_inputs=of_inputs) for step in (STEP, -STEP))
    derivative = (high - low) / (2 * STEP)
    names = [name for name, _ in model.named_parameters()]
    of_model, of_partitions = ([each[name] for name in names] if isinstance(each, Mapping) else [*each] for each in (wanted, got))
    return _is_close(of_partitions, direction, derivative) and not _is_close(of_model, direction, derivative)


def _inputs(program: Program) -> tuple[tuple[object, ...], dict[str, object], list[Tensor], Tensor]:
    """Positional and keyword inputs of the first call, those of them that have gradients, and the target."""
    args, kwargs, target = make_inputs(program, program.rows, is_switched=program.usage.starts_switched)
    named = dict(zip([each.name for each in program.inputs if not each.keyword], args, strict=True)) | kwargs
    passed = [named[each.name] for each in program.inputs if each.name in named and not each.is_written]
    return args, kwargs, [each for each in leaves_of(passed) if isinstance(each, Tensor) and has_gradient(each)], target


def _loss(program: Program, model: nn.Module, direction: Sequence[Tensor], step: float, *, of_inputs: bool) -> float:
    """Return the loss a step away along a direction, with the random draws of the first call."""
    moved = copy.deepcopy(model)
    args, kwargs, leaves, target = _inputs(program)
    with torch.no_grad():
        for each, along in zip(leaves if of_inputs else moved.parameters(), direction, strict=True):
            each.add_(step * along)
        torch.manual_seed(0)
        return float(loss_function(program, moved)(moved(*args, **kwargs), target))


def _is_close(gradients: Sequence[Tensor | None], direction: Sequence[Tensor], derivative: float) -> bool:
    pairs = [(gradient, along) for gradient, along in zip(gradients, direction, strict=True) if gradient is not None]
    slope = sum(float((as_real(gradient) * as_real(along)).sum()) for gradient, along in pairs)
    length = math.hypot(*(float(as_real(gradient).norm()) for gradient, _ in pairs))
    return abs(slope - derivative) <= TOLERANCE * length
