"""The interface of a runtime: run the programs of this process's ranks, and exchange values with other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from partitioner.runtime.collectives.transfers import Exchanged, Transfer
from partitioner.runtime.executor import ProgramSet
from partitioner.runtime.process.groups import Members


class Runtime(Protocol):
    """Runs programs. ``partitioner.runtime.embedded`` has all ranks here, ``partitioner.runtime.torchrun`` one."""

    n_ranks: int
    local_ranks: tuple[int, ...]
    devices: tuple[torch.device, ...]

    @property
    def members(self) -> Members | None:
        """Return the process of each rank; None: all ranks are in this one."""

    def run(
        self,
        programs: ProgramSet,
        inputs: Mapping[int, Mapping[str, Any]],
        given: Mapping[str, Tensor] | None = None,
        optimizer_steps: Sequence[int] = (),
    ) -> dict[int, Any]:
        """Run the program of every rank of this process; return rank -> result.

        Args:
            inputs: rank -> placeholder of its program -> value.
            given: name -> tensor that the script passed, the same on all ranks that pass it; compared to find skipped steps.
            optimizer_steps: the distinct step counts of the optimizers of this process, compared likewise.
        """

    def agree(self, what: str, value: object, *, in_step: bool = False) -> str | None:
        """Raise ConfigError on every rank when ranks do not all say the same value; a rank that says None takes over what others say.

        Args:
            what: the question, in the words of errors; the same on all ranks, which remember the last value agreed on.
            value: of this process.
            in_step: whether ``run``, ``collect`` or ``reduce`` follows. A process whose value was agreed on last does not wait; those
                that wait, with another value or None, must be notified that it went on: by the next method, else by ``agree``.

        Returns:
            The value as text; None where no rank knows it.
        """

    def failing_together(self) -> AbstractContextManager[object]:
        """Return a context in which an error on one rank ends the waiting of all others."""

    def collect(self, owned: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the union of the tensors that the processes own, on every process; each name is owned by one of them."""

    def reduce(self, value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """Reduce a number over all processes."""

    def exchange(self, transfers: Sequence[Transfer], tensors: Mapping[int, Tensor]) -> Exchanged:
        """Carry out transfers between ranks; every process must call it with the same transfers.

        Args:
            transfers: from one rank to another, in an order that is the same everywhere.
            tensors: number of a transfer -> what it sends, for the transfers from ranks of this process.
        """
