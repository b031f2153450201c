"""The first failure of any rank, which every rank learns, so that its error names the cause and not only the consequence.

When rank 2 of four dies:

    rank 2            its process ends, and with it its connections
    rank 0            watches (see ``partitioner.runtime.process.watch``), and informs ranks 1 and 3
    ranks 0, 1, 3     their waits fail; each looks up the first failure, and raises an error that names rank 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from passes.ir.errors import CommunicationError, ConfigError, PartitionError


class Store(Protocol):
    """The used part of ``torch.distributed.Store``, which all processes read and write."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class FailureRecord(Protocol):
    """The first failure among all processes of one connection."""

    def report(self, failure: Failure) -> Failure:
        """Record a failure unless there is one; return the first."""

    def first(self) -> Failure | None:
        """Return the first failure that this process knows of."""

    def left(self) -> dict[int, str]:
        """Return rank whose script has ended -> how it ended, as text."""


class DisagreementError(ConfigError):
    """Ranks make the same call with different values, or different calls."""

    REMEDY = (
        "make the same calls on every rank, with the same model, arguments and inputs; "
        'with inputs="local", as many rows (DistributedSampler sees to that)'
    )

    def __init__(self, problem: str) -> None:
        super().__init__(problem, remedy=self.REMEDY)


@dataclass(frozen=True)
class Failure:
    """A failure that ends the work of all ranks.

    Attributes:
        rank: the rank that failed.
        text: the cause, naming ranks.
        disagreement: whether ranks make different calls: then every rank raises the same error.
        lost: whether the process of ``rank`` has died: it reports nothing itself.
    """

    rank: int
    text: str
    disagreement: bool = False
    lost: bool = False

    def error_on(self, rank: int, own: BaseException) -> BaseException:
        """Return the error that ``rank`` raises: its ``own``, with this failure added if that is only a consequence of it."""
        if self.disagreement:
            return DisagreementError(self.text)
        if self.rank == rank or not isinstance(own, CommunicationError) or self.text in own.problem:
            return own
        remedy = f"look at why rank {self.rank} ended" if self.lost else f"look at what rank {self.rank} reports"
        return CommunicationError(f"{own.problem}\n  first failure: {self.text}", remedy=remedy)


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return the failure by which a rank reports its own error to the others."""
    if isinstance(error, DisagreementError):
        return Failure(rank, error.problem, disagreement=True)
    if isinstance(error, CommunicationError):
        return Failure(rank, error.problem)
    problem = error.problem if isinstance(error, PartitionError) else str(error)
    return Failure(rank, f"rank {rank} failed: {type(error).__name__}: {problem}")
