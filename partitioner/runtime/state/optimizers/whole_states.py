"""The interface of an optimizer that keeps the state of a sharded parameter whole, in the process of the rank that owns it."""

from __future__ import annotations

import abc

from torch import Tensor
from torch.optim import Optimizer


class WholeStateOptimizer(Optimizer, abc.ABC):
    """An optimizer of shards; ``state[shard]`` holds the entries of the whole parameter on its owner, and none elsewhere."""

    optimizer_class: type[Optimizer]
    """The class that updates whole parameters."""

    @abc.abstractmethod
    def is_sharded(self, parameter: Tensor) -> bool:
        """Return whether a parameter of the optimizer is a shard, with its state on the owner of the parameter."""

    @abc.abstractmethod
    def keeps(self, parameter: Tensor) -> bool:
        """Return whether this process has the state of a sharded parameter, as entries of this shard."""

    @property
    @abc.abstractmethod
    def has_state(self) -> bool:
        """Whether a step has created the state; the same on all ranks, also on those that keep none."""


def updating_class(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class whose state an optimizer has."""
    return optimizer.optimizer_class if isinstance(optimizer, WholeStateOptimizer) else type(optimizer)
