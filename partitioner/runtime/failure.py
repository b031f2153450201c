"""The first failure of any rank, kept where all ranks can read it: whoever is left alone learns why.

When rank 2 of four dies:

    rank 2            its connections close
    ranks 1 and 3     a wait fails: they record that rank 2 has left, close their own connections and raise
    rank 0            a wait on rank 1 fails: it finds the record, and raises an error that names rank 2
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Protocol

from passes.ir.errors import CommunicationError, ConfigError, PartitionError

__all__ = ["DisagreementError", "Failure", "FailureRecord", "Store", "failure_of"]

_KEY = "first failure"


class Store(Protocol):
    """What all processes can read and write: the part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class DisagreementError(ConfigError):
    """Ranks make the same call with different values, or different calls."""

    REMEDY = (
        "make the same calls on every rank, with the same model and inputs; "
        'with inputs="local", as many rows (DistributedSampler sees to that)'
    )

    def __init__(self, problem: str) -> None:
        super().__init__(problem, remedy=self.REMEDY)


@dataclass(frozen=True)
class Failure:
    """What failed first.

    Attributes:
        rank: who reports it.
        text: what happened, naming ranks.
        disagreement: whether ranks disagree: then every rank raises the same error.
    """

    rank: int
    text: str
    disagreement: bool = False

    def error_on(self, rank: int, own: BaseException) -> BaseException:
        """What a rank raises whose own error is but a consequence of this, or is this."""
        if self.disagreement:
            return DisagreementError(self.text)
        if self.rank == rank or not isinstance(own, CommunicationError):
            return own
        return CommunicationError(f"{own.problem}\n  first failure: {self.text}", remedy=f"look at what rank {self.rank} reports")


class FailureRecord:
    """The first failure among the processes that share a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def report(self, failure: Failure) -> Failure:
        """Record a failure unless there is one; returns the first."""
        try:
            text = self._store.compare_set(_KEY, "", json.dumps(dataclasses.asdict(failure)))
        except RuntimeError:
            # The store went with the process that held it: this rank knows no more than itself.
            return failure
        return Failure(**json.loads(text))

    def first(self) -> Failure | None:
        """The first failure, if there was one."""
        if not self._store.check([_KEY]):
            return None
        return Failure(**json.loads(self._store.get(_KEY)))


def failure_of(rank: int, error: BaseException) -> Failure:
    """How a rank reports its own error to the others."""
    if isinstance(error, DisagreementError):
        return Failure(rank, error.problem, disagreement=True)
    if isinstance(error, CommunicationError):
        return Failure(rank, error.problem)
    problem = error.problem if isinstance(error, PartitionError) else str(error)
    return Failure(rank, f"rank {rank} failed: {type(error).__name__}: {problem}")
