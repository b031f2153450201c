"""Do all ranks say the same? Asked at every call, without waiting for anybody while nothing changes.

Each rank keeps one line in the store: how many questions it has passed, and how many times all ranks agreed on something new. A rank whose
own value is the one agreed last writes the count and goes on; in a step, which has several questions, it writes when it starts its program.
A rank whose value is new writes it down and looks at the others' lines until each has written its value for the same question, or has
passed it:

    question              16      17             18
    rank 0                -       "batch 6"      -        17: looks at the others
    rank 1                -       "batch 6"      -        17: looks at the others
    rank 2                -       -                       passed 17, and took part in no agreement: it has the old value
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from partitioner.runtime.process.call_order import rank_list
from partitioner.runtime.process.failure import DisagreementError, FailureRecord, Store
from passes.ir.errors import CommunicationError

__all__ = ["Agreement"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
"""Seconds between two looks, doubled each time: most ranks come at once, and a late one may be minutes late."""

_UNKNOWN = "?"
"""What a rank writes that takes over what others say."""


@dataclass(frozen=True)
class _Line:
    """What a rank has written: questions passed, agreements, and its value if it is asking."""

    question: int
    agreements: int
    value: str | None

    def __str__(self) -> str:
        return f"{self.question} {self.agreements}" + ("" if self.value is None else f" {self.value}")

    @staticmethod
    def parse(text: str) -> _Line:
        question, agreements, *value = text.split(" ", 2)
        return _Line(int(question), int(agreements), value[0] if value else None)


class Agreement:
    """One rank's part in all agreements.

    Args:
        store: shared with the other ranks, and with nothing else that writes these keys.
        rank, size: who this is, of how many.
        timeout: how long the others may take to come to the same question.
        record: says why, when they do not come.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, record: FailureRecord) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._record = record
        self._question = 0
        self._agreements = 0
        self._agreed: dict[str, str] = {}

    def agree(self, what: str, value: object, *, in_step: bool = False) -> str | None:
        """Return when all ranks say the same; a rank that cannot know it says None, and gets what the others say.

        Args:
            what: names the question.
            value: of this rank.
            in_step: ``go_on`` follows before this rank waits for anything else: the others hear then that it has passed.

        Returns:
            The value as text; None where no rank knows it.

        Raises:
            DisagreementError: naming each rank's value.
            CommunicationError: a rank did not come to this question.
        """
        text = _UNKNOWN if value is None else str(value)
        self._question += 1
        if value is not None and self._agreed.get(what) == text:
            if not in_step:
                # Nothing else may tell the others for long, and one that says None or another value waits to hear it.
                self.go_on()
            return text
        self._write(f"{what}: {text}")
        found = self._values(what, knows=value is not None)
        old = self._agreed.get(what, "another one")
        said = {rank: old if line is None else line.removeprefix(f"{what}: ") for rank, line in found.items()}
        known = set(said.values()) - {_UNKNOWN}
        if len(known) > 1 or (value is not None and None in found.values()):
            raise DisagreementError(_differ(what, {rank: name for rank, name in said.items() if name != _UNKNOWN}))
        agreed = next(iter(known), _UNKNOWN)
        if None not in found.values():
            self._agreements += 1
            self._agreed[what] = agreed
            self._store.set(f"agreement {self._agreements}", f"{what}: {agreed}")
        return None if agreed == _UNKNOWN else agreed

    def go_on(self) -> None:
        """Say that this rank has passed all its questions and acts on the answers."""
        self._write(None)

    def _write(self, value: str | None) -> None:
        self._store.set(f"rank {self._rank}", str(_Line(self._question, self._agreements, value)))

    def _values(self, what: str, *, knows: bool) -> dict[int, str | None]:
        """What each rank says to the present question; None: it went on with what was agreed before.

        A rank that knows nothing itself asks no further once it has seen a rank go on.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _FIRST_PAUSE
        found: dict[int, str | None] = {}
        while True:
            for rank in range(self._size):
                if rank not in found and (line := self._line(rank)) is not None and line.question >= self._question:
                    found[rank] = self._answer(line)
            if len(found) == self._size or (not knows and None in found.values()):
                return found
            missing = [rank for rank in range(self._size) if rank not in found]
            self._check_waiting(missing, f"{'has a new' if knows else 'asks for the'} {what}", deadline)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _answer(self, line: _Line) -> str | None:
        """What a rank says to the present question, by its line; None: it went on with what was agreed before."""
        if line.agreements > self._agreements:
            # One agreement more than this rank counts is that on the present question: all ranks said the same.
            return self._store.get(f"agreement {self._agreements + 1}").decode()
        return line.value if line.question == self._question else None

    def _check_waiting(self, missing: list[int], asks: str, deadline: float) -> None:
        """Raise where it is no use to wait for the missing ranks: something has failed, one of them has ended, or it is too late."""
        late = CommunicationError(
            f"rank {self._rank} {asks}, and {rank_list(missing)} did not make the same call", remedy=DisagreementError.REMEDY
        )
        if (failure := self._record.first()) is not None:
            raise failure.error_on(self._rank, late)
        ended = self._record.left()
        if gone := [rank for rank in missing if rank in ended]:
            raise CommunicationError(f"{late.problem}: {rank_list(gone)} {ended[gone[0]]}", remedy=DisagreementError.REMEDY)
        if time.monotonic() > deadline:
            raise late

    def _line(self, rank: int) -> _Line | None:
        key = f"rank {rank}"
        return _Line.parse(self._store.get(key).decode()) if self._store.check([key]) else None


def _differ(what: str, values: Mapping[int, str]) -> str:
    """Who says what: ``rank 2 has batch size 6, the others 8``."""
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):  # the same on every rank, whoever it heard of first
        ranks_of[value].append(rank)
    *few, (common, many) = sorted(ranks_of.items(), key=lambda item: len(item[1]))
    said = [f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} {what} {value}" for value, ranks in few]
    return ", ".join([*said, f"{rank_list(many)} has {common}" if len(many) == 1 else f"the others {common}"])
