"""Partitioned models by number: compiled code holds numbers, where it cannot hold a model."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["NumberedModel", "ResultsOfCalls", "number_of", "numbered_model"]


class ArgumentsOfCalls(Protocol):
    """Facts of a model's arguments for compiled code; see ``partitioner.specialize.arguments``."""

    def takes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, with_lacking: bool = False, exactly: bool = True) -> bool:
        """Return whether a call passes the arguments that were traced; ``with_lacking``: None may stand for a tensor."""

    def check_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ConfigError if a call has another dtype, or another value of what is no tensor."""

    def rows_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | torch.SymInt:
        """Return the rows that a call passes."""


class ResultsOfCalls(Protocol):
    """Facts of a model's results for compiled code; see ``partitioner.model.calls``."""

    @property
    def arguments(self) -> ArgumentsOfCalls:
        """The arguments that were traced."""

    @property
    def asks_for_gradients(self) -> bool:
        """Whether code of the model asks whether gradients are on, or required."""

    def refuse_compiled(self) -> None:
        """Raise ConfigError if forward writes into its arguments."""

    def result_shapes(self, rows: int | torch.SymInt) -> list[tuple[list[Any], torch.dtype]]:
        """Return sizes and dtype of each returned node."""

    def values_of(self, result: Any) -> list[Tensor]:
        """Return the value of each returned node."""

    def computed_leaves(self, values: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of the result that differ between calls."""


class NumberedModel(Protocol):
    """Interface of a model for compiled code."""

    @property
    def calls(self) -> ResultsOfCalls:
        """Its results, in the modes that it was partitioned in."""

    @property
    def is_traced(self) -> bool:
        """Whether it has been traced in the modes that its modules have now."""

    @property
    def result_device(self) -> torch.device:
        """Device of its results."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's result."""


_models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def number_of(model: NumberedModel) -> int:
    """Return a new number for a model, by which it can be found as long as it lives."""
    number = next(_numbers)
    _models[number] = model
    return number


def numbered_model(number: int) -> NumberedModel:
    """Return the model with a number."""
    model: NumberedModel = _models[number]
    return model
