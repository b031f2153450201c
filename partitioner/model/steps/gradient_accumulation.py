"""Accumulate gradients over several steps without communication, as ``DistributedDataParallel.no_sync`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from partitioner.runtime.state.gradient_slots import is_unsummed
from passes.emit.place_on_mesh import Gradients
from passes.ir.errors import ConfigError


class Accumulation:
    """Decides whether a step sums gradients over ranks, and knows whether parts of earlier steps are still to be summed."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._parameters = tuple(parameters)
        self.holds = False
        """Whether steps now keep each rank's part of gradients."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep each rank's part of gradients inside; see ``PartitionedModel.no_sync``."""
        before, self.holds = self.holds, True
        try:
            yield
        finally:
            self.holds = before

    @property
    def gradients(self) -> Gradients:
        """Handling of gradients in the next step: keep parts, add them to the parts of earlier steps and sum, or sum its own."""
        if self.holds:
            return "keep"
        return "add" if any(is_unsummed(parameter) for _, parameter in self._parameters) else "sum"

    def check(self, what: str) -> None:
        """Raise ConfigError while a gradient is this rank's part of a sum; ``what`` names the call that needs whole gradients."""
        name = next((name for name, parameter in self._parameters if is_unsummed(parameter)), None)
        if name is not None:
            raise ConfigError(
                f"{what} needs whole gradients, and that of {name} is this rank's part: every step since it was cleared ran in no_sync()",
                remedy="run the last step of an accumulation outside no_sync()",
            )
