"""Models of the zoo: construction, inputs and training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

BATCH_SIZE = 8
"""Rows of a batch unless a test says otherwise; no model uses it as another size, so that a mistaken dimension shows."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


@dataclass(frozen=True)
class Instance:
    """One model with one batch: everything that a training step needs.

    Attributes:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        target: second argument of the loss function; None when the model returns its loss.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any


@dataclass(frozen=True)
class Case:
    """A model, its inputs and its loss. Equal seeds give equal instances.

    Attributes:
        name: of the test that runs it.
        model: builds the model from the global random state.
        inputs: draws the inputs of a batch with so many rows.
        target: draws the target; None when the model returns its loss.
        loss_fn: mean over the batch; None when the model returns its loss (as ``.loss``, or as a scalar).
        batch_norm: whether its training depends on which rows share a microbatch.
        uneven_loss: whether rows count unequally in the loss that it returns (a mean over the labelled tokens of all rows).
        compares_rows: whether its loss compares every row of the batch with every other: there are no microbatches.
        tolerance: largest relative error in float64; wider where the model itself computes in float32.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[Generator, int], Inputs]
    target: Callable[[Generator, int], Any] | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    batch_norm: bool = False
    uneven_loss: bool = False
    compares_rows: bool = False
    tolerance: float = 1e-9

    def microbatches(self, count: int) -> int:
        """Into how many microbatches its batch can be cut, of so many that are wanted."""
        return 1 if self.compares_rows else count

    def build(
        self, seed: int = 0, batch_size: int = BATCH_SIZE, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu"
    ) -> Instance:
        """Return the model and one batch on a device, all floating-point values of the dtype; the numbers are the same on every device."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = self.model().to(device, dtype).train()
        generator = torch.Generator().manual_seed(seed + 1)
        args, kwargs = with_dtype(self.inputs(generator, batch_size), dtype, device)
        target = None if self.target is None else with_dtype(self.target(generator, batch_size), dtype, device)
        return Instance(model, args, kwargs, target)


def with_dtype(values: Any, dtype: torch.dtype, device: str | torch.device = "cpu") -> Any:
    """Return the same nested values on a device, with every floating-point tensor converted; integers and flags keep their type."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    return torch.utils._pytree.tree_map(convert, values)


def real(generator: Generator, *shape: int) -> Tensor:
    """Draw normally distributed numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def classes(generator: Generator, count: int, *shape: int) -> Tensor:
    """Return integers in [0, count): tokens or class labels."""
    return torch.randint(count, shape, generator=generator)


def flags(generator: Generator, *shape: int) -> Tensor:
    """Fair coin flips as booleans."""
    return torch.rand(shape, generator=generator) < 0.5


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean over all elements, hence over the batch."""
    return nn.functional.mse_loss(output, target)
