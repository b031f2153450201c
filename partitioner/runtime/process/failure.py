"""The first failure of any rank, which every rank learns: whoever is left alone raises with the cause, not with its consequence.

When rank 2 of four dies:

    rank 2            its process ends, and with it its connections
    rank 0            watches (see ``partitioner.runtime.process.watch``), and tells ranks 1 and 3
    ranks 0, 1, 3     what they wait for fails; each looks for the first failure, and raises an error that names rank 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from passes.ir.errors import CommunicationError, ConfigError, PartitionError

__all__ = ["DisagreementError", "Failure", "FailureRecord", "Store", "failure_of"]


class Store(Protocol):
    """What all processes can read and write: the part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class FailureRecord(Protocol):
    """The first failure among all processes of one connection."""

    def report(self, failure: Failure) -> Failure:
        """Record a failure unless there is one; returns the first."""

    def first(self) -> Failure | None:
        """The first failure that this process knows of."""

    def left(self) -> dict[int, str]:
        """The ranks whose scripts have ended, and how."""


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
    """What failed first.

    Attributes:
        rank: whose failure it is.
        text: what happened, naming ranks.
        disagreement: whether ranks disagree: then every rank raises the same error.
        lost: whether the process of ``rank`` is gone: it reports nothing itself.
    """

    rank: int
    text: str
    disagreement: bool = False
    lost: bool = False

    def error_on(self, rank: int, own: BaseException) -> BaseException:
        """What a rank raises whose own error is but a consequence of this, or is this."""
        if self.disagreement:
            return DisagreementError(self.text)
        if self.rank == rank or not isinstance(own, CommunicationError) or self.text in own.problem:
            return own
        remedy = f"look at why rank {self.rank} ended" if self.lost else f"look at what rank {self.rank} reports"
        return CommunicationError(f"{own.problem}\n  first failure: {self.text}", remedy=remedy)


def failure_of(rank: int, error: BaseException) -> Failure:
    """How a rank reports its own error to the others."""
    if isinstance(error, DisagreementError):
        return Failure(rank, error.problem, disagreement=True)
    if isinstance(error, CommunicationError):
        return Failure(rank, error.problem)
    problem = error.problem if isinstance(error, PartitionError) else str(error)
    return Failure(rank, f"rank {rank} failed: {type(error).__name__}: {problem}")
