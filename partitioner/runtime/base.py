"""What a runtime is: some ranks in this process, a way to run their programs, and to look at what other processes hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from partitioner.runtime.executor import ProgramSet

__all__ = ["Runtime"]


class Runtime(Protocol):
    """Runs programs. ``partitioner.runtime.embedded`` has all ranks here, ``partitioner.runtime.torchrun`` one."""

    n_ranks: int
    local_ranks: tuple[int, ...]
    devices: tuple[torch.device, ...]
    backward_anywhere: bool
    """Whether ``.backward()`` on a result can reach every rank: all of them are here."""

    def run(
        self,
        programs: ProgramSet,
        inputs: Mapping[int, Mapping[str, Any]],
        given: Mapping[str, Tensor] | None = None,
        optimizer_steps: Sequence[int] = (),
    ) -> dict[int, Any]:
        """Run the program of every rank of this process; returns each one's result.

        Args:
            inputs: rank -> what its program takes.
            given: name -> what the script passed, which is the same on all ranks that pass it.
            optimizer_steps: made so far by each optimizer of this process, each number once.
        """

    def agree(self, what: str, value: object, *, in_step: bool = False) -> str | None:
        """Raise ConfigError on every rank when ranks do not all say the same value; a rank that says None takes over what others say.

        Args:
            what: names the question.
            value: of this process.
            in_step: ``run`` follows, which tells the others that this process has passed the question: nothing is written twice.

        Returns:
            The value as text; None where no rank knows it.
        """

    def failing_together(self) -> AbstractContextManager[object]:
        """Whatever is raised inside on one rank ends the waiting of all others."""

    def collect(self, owned: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The union of what the processes own, on every process; each name is owned by one of them."""

    def reduce(self, value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """A number reduced over all processes."""
