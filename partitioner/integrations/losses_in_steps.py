"""Let the partitioned models of a loop run their training step inside of a call, where the model returns the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from partitioner.model.partitioned_model import PartitionedModel

__all__ = ["losses_in_steps"]


@contextlib.contextmanager
def losses_in_steps(modules: Iterable[nn.Module], *, reads_loss_alone: bool = False) -> Iterator[None]:
    """Run steps inside of the calls of those modules that are partitioned models; see ``partitioner.model.steps.loss_in_step``.

    Args:
        reads_loss_alone: whether the loop is known to read no result of them but the loss.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            if isinstance(module, PartitionedModel):
                stack.enter_context(module.loss_in_step.on(reads_loss_alone=reads_loss_alone))
        yield
