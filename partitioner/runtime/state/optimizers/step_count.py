"""Count the steps of a model's optimizers, to detect ranks that have skipped a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


class OptimizerSteps:
    """Counts the steps of all optimizers with any of the ``named_parameters`` of a model, from the first call of ``counts`` on."""

    def __init__(self, named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        self._named_parameters = named_parameters
        self._known: frozenset[int] = frozenset()

    def counts(self) -> tuple[int, ...]:
        """Return the distinct step counts of the model's optimizers."""
        _count_steps()
        return tuple(sorted({steps for optimizer, steps in list(_steps.items()) if self._has(optimizer)}))

    def _has(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has a parameter of the model; known parameters are read anew before False is returned."""
        if self._shares(optimizer):
            return True
        self._known = frozenset(id(parameter) for _, parameter in self._named_parameters())
        return self._shares(optimizer)

    def _shares(self, optimizer: Optimizer) -> bool:
        return any(id(parameter) in self._known for group in optimizer.param_groups for parameter in group["params"])


@functools.cache
def _count_steps() -> None:
    """Register a hook, once, that counts the steps of every optimizer of the process."""

    def count(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        _steps[optimizer] = _steps.get(optimizer, 0) + 1

    register_optimizer_step_post_hook(count)
