"""Check at every call that all ranks have the same value, without waiting while values stay the same.

Each rank keeps one line in the store: the number of questions it has passed, of new values that all ranks agreed on, and its last call that
waits for the others. A rank whose value is the one agreed on last writes its line and goes on; in a step, which has several questions, it
writes when it starts its program. A rank whose value is new writes the value and polls the others' lines until each has written its value
for the same question, or has passed it:

    question              16      17             18
    rank 0                -       "batch 6"      -        17: polls the others
    rank 1                -       "batch 6"      -        17: polls the others
    rank 2                -       -                       passed 17 without a new agreement: it has the old value
    rank 3                -       in a later call         it waits for the others there, and will not come to 17
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from partitioner.runtime.process.failure import DisagreementError, FailureRecord, Store
from passes.ir.errors import CommunicationError
from passes.ir.mesh import rank_list

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
"""Seconds between two polls, doubled each time: most ranks come at once, and a late one may be minutes late."""

_UNKNOWN = "?"
"""Written by a rank that has no value and takes that of the others."""


@dataclass(frozen=True)
class _Line:
    """The line of a rank in the store.

    Attributes:
        question: number of its last question.
        agreements: number of agreements.
        call: number of its last call.
        what: names that call.
        value: its value while it polls.
    """

    question: int
    agreements: int
    call: int
    what: str
    value: str | None

    def __str__(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @staticmethod
    def parse(text: str) -> _Line:
        return _Line(*json.loads(text))


class Agreement:
    """One rank's part in all agreements.

    Args:
        store: shared with the other ranks; no one else writes its keys.
        rank, size: of this process; number of ranks.
        timeout: how long the others may take to come to the same question.
        record: knows failures of other ranks, which end the waiting.
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
        self._call = 0
        self._what = ""

    def agree(self, what: str, value: object, *, in_step: bool = False) -> str | None:
        """Return when all ranks have the same value; a rank with None gets the value of the others.

        Args:
            what: the question, in the words of errors; the same on all ranks.
            value: of this rank.
            in_step: whether ``begin_call`` follows before this rank waits for anything else, so that the line need not be written here.

        Returns:
            The value as text; None if all ranks have None.

        Raises:
            DisagreementError: naming each rank's value.
            CommunicationError: a rank did not come to this question.
        """
        text = _UNKNOWN if value is None else str(value)
        self._question += 1
        if value is not None and self._agreed.get(what) == text:
            if not in_step:
                # A rank with None or another value polls for this line.
                self.go_on()
            return text
        self._write(f"{what}: {text}")
        answers = self._answers(what, None if value is None else text)
        old = self._agreed.get(what, "another one")
        values = {rank: old if answer is None else answer.removeprefix(f"{what}: ") for rank, answer in answers.items()}
        distinct = set(values.values()) - {_UNKNOWN}
        if len(distinct) > 1 or (value is not None and None in answers.values()):
            raise DisagreementError(_describe_difference(what, {rank: text for rank, text in values.items() if text != _UNKNOWN}))
        agreed = next(iter(distinct), _UNKNOWN)
        if None not in answers.values():
            self._agreements += 1
            self._agreed[what] = agreed
            self._store.set(f"agreement {self._agreements}", f"{what}: {agreed}")
        return None if agreed == _UNKNOWN else agreed

    def begin_call(self, number: int, what: str) -> None:
        """Notify the other ranks that this rank has passed all its questions, and waits for them in its next call from here on."""
        self._call, self._what = number, what
        self.go_on()

    def go_on(self) -> None:
        """Notify the other ranks that this rank has passed all its questions."""
        self._write(None)

    def _write(self, value: str | None) -> None:
        self._store.set(f"rank {self._rank}", str(_Line(self._question, self._agreements, self._call, self._what, value)))

    def _answers(self, what: str, value: str | None) -> dict[int, str | None]:
        """Poll until every rank has answered the present question; return rank -> answer, see ``_answer``.

        A rank without a value returns as soon as one rank has gone on with the value agreed before.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _FIRST_PAUSE
        answers: dict[int, str | None] = {}
        while True:
            for rank in range(self._size):
                line = None if rank in answers else self._line(rank)
                if line is not None and line.question >= self._question:
                    answers[rank] = self._answer(line)
                elif line is not None and line.call > self._call:
                    raise DisagreementError(self._other_call(rank, line, what, value))
            if len(answers) == self._size or (value is None and None in answers.values()):
                return answers
            missing = [rank for rank in range(self._size) if rank not in answers]
            self._check_waiting(missing, f"{'asks for the' if value is None else 'has a new'} {what}", deadline)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _answer(self, line: _Line) -> str | None:
        """Return the answer of a rank to the present question, read from its line; None: it went on with the value agreed before."""
        if line.agreements > self._agreements:
            # The one agreement that this rank does not count yet is on the present question.
            return self._store.get(f"agreement {self._agreements + 1}").decode()
        return line.value if line.question == self._question else None

    def _other_call(self, rank: int, line: _Line, what: str, value: str | None) -> str:
        """Return how a rank's call differs, which this one has not begun: all ranks come to a question before the call after it."""
        asks = f"asks for the {what}" if value is None else f"has {what} {value}"
        return f"call {line.call} is not the same on all ranks: {rank_list([rank])} runs {line.what}, rank {self._rank} {asks}"

    def _check_waiting(self, missing: list[int], asks: str, deadline: float) -> None:
        """Raise if waiting for the missing ranks is useless: a rank has failed, one of them has ended, or time is over."""
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
        """Read the line of a rank; None if it has written none yet."""
        key = f"rank {rank}"
        return _Line.parse(self._store.get(key).decode()) if self._store.check([key]) else None


def _describe_difference(what: str, values: Mapping[int, str]) -> str:
    """Return the value of each rank as text: ``rank 2 has batch size 6, the others 8``."""
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):  # the same text on every rank, in whatever order answers came
        ranks_of[value].append(rank)
    *exceptions, (common, common_ranks) = sorted(ranks_of.items(), key=lambda item: len(item[1]))
    clauses = [f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} {what} {value}" for value, ranks in exceptions]
    clauses.append(f"{rank_list(common_ranks)} has {common}" if len(common_ranks) == 1 else f"the others {common}")
    return ", ".join(clauses)
