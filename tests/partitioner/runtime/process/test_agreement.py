"""Ranks ask the same questions, and either agree or all learn each rank's answer. Ranks are threads here, around a store in memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.runtime.process.agreement import Agreement
from partitioner.runtime.process.failure import DisagreementError, Failure, failure_of
from passes.ir.errors import CommunicationError, ConfigError


class MemoryStore:
    """Torch's store as a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self.n_calls = 0

    def set(self, key: str, value: str) -> None:
        self.n_calls += 1
        self._values[key] = value

    def get(self, key: str) -> bytes:
        self.n_calls += 1
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self.n_calls += 1
        return all(key in self._values for key in keys)


class MemoryRecord:
    """The watch of all processes, in one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: Failure | None = None
        self.ended: dict[int, str] = {}

    def report(self, failure: Failure) -> Failure:
        with self._lock:
            self._first = self._first or failure
            return self._first

    def first(self) -> Failure | None:
        return self._first

    def left(self) -> dict[int, str]:
        return self.ended


Question = tuple[str, int | None]


def ask(
    values: Sequence[Sequence[Question]], seed: int = 0, timeout: float = 10.0, answers: list[list[str | None]] | None = None
) -> list[str]:
    """Ask each rank's questions in order, at times with a program started after one; return the error of each."""
    store, record = MemoryStore(), MemoryRecord()
    said = [""] * len(values)

    def run(rank: int) -> None:
        agreement = Agreement(store, rank, len(values), timedelta(seconds=timeout), record)
        pauses = random.Random(seed * 31 + rank)
        for what, value in values[rank]:
            if pauses.random() < 0.3:
                threading.Event().wait(pauses.random() * 0.003)
            in_step = pauses.random() < 0.5
            try:
                told = agreement.agree(what, value, in_step=in_step)
                if in_step:
                    agreement.go_on()
                if answers is not None:
                    answers[rank].append(told)
            except DisagreementError as error:
                first = record.report(failure_of(rank, error))
                said[rank] = str(first.error_on(rank, error))
                return

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout)
        assert not thread.is_alive(), "a rank waits for ever"
    return said


questions = st.lists(st.tuples(st.sampled_from(["batch size", "program"]), st.integers(1, 2)), min_size=1, max_size=8)


@pytest.mark.slow
@given(questions, st.integers(1, 4), st.integers(0, 100))
def test_equal_values_pass(asked: list[Question], size: int, seed: int) -> None:
    assert ask([asked] * size, seed) == [""] * size


@pytest.mark.slow
@given(questions, st.integers(2, 4), st.data())
def test_a_rank_with_another_value_is_found(asked: list[Question], size: int, data: st.DataObject) -> None:
    """Every rank that asks again learns of it; a rank that has only begun to act is stopped by its lost connections."""
    rank, position = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, len(asked) - 1))
    what, _ = asked[position]
    other = [*asked[:position], (what, 6), *asked[position + 1 :]]
    said = ask([other if each == rank else asked for each in range(size)], data.draw(st.integers(0, 100)))
    assert f"has {what}" in said[rank]
    assert "6" in said[rank]
    for text in said:
        assert text in ("", said[rank])


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["batch size", "program"]), st.integers(1, 2)), min_size=1, max_size=8), st.data())
def test_a_rank_that_knows_nothing_is_told(asked: list[Question], data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    knowing = [data.draw(st.sets(st.integers(0, size - 1), min_size=1)) for _ in asked]
    said, told = (
        [[(what, value if rank in knowing[position] else None) for position, (what, value) in enumerate(asked)] for rank in range(size)],
        [[str(value) for _, value in asked] for _ in range(size)],
    )
    answers: list[list[str | None]] = [[] for _ in range(size)]
    assert ask(said, data.draw(st.integers(0, 100)), answers=answers) == [""] * size
    assert answers == told


def test_nobody_knows() -> None:
    answers: list[list[str | None]] = [[], []]
    assert ask([[("batch size", None), ("batch size", 4)], [("batch size", None), ("batch size", None)]], answers=answers) == ["", ""]
    assert answers == [[None, "4"], [None, "4"]]


def test_a_rank_that_knows_nothing_new_leaves_nobody_waiting() -> None:
    """Outside of steps, where it starts no program: a script may wait for other ranks after each question."""
    store = MemoryStore()
    record = MemoryRecord()
    ranks = [Agreement(store, rank, 2, timedelta(seconds=0.5), record) for rank in range(2)]
    first = threading.Thread(target=ranks[0].agree, args=("plan", "A"))
    first.start()
    assert ranks[1].agree("plan", None) == "A"
    first.join()
    assert ranks[0].agree("plan", "A") == "A"
    assert ranks[1].agree("plan", None) == "A"
    ranks[0].agree("plan", "A")
    with pytest.raises(DisagreementError, match="rank 0 has plan A, rank 1 has B"):
        ranks[1].agree("plan", "B")


def test_everybody_is_named() -> None:
    said = ask([[("batch size", 8), ("batch size", value)] for value in (8, 8, 6, 8)])
    assert "rank 2 has batch size 6, the others 8" in said[2]
    said = ask([[("batch size", value)] for value in (8, 7, 6, 8)])
    assert all("rank 1 has batch size 7, rank 2 has batch size 6, the others 8" in text for text in said)


def test_the_store_is_left_alone_while_nothing_changes() -> None:
    store = MemoryStore()
    agreement = Agreement(store, 0, 1, timedelta(seconds=1), MemoryRecord())
    agreement.agree("batch size", 8)
    before = store.n_calls
    for _ in range(100):
        agreement.agree("batch size", 8, in_step=True)
    assert store.n_calls == before
    agreement.agree("batch size", 8)
    assert store.n_calls == before + 1


def test_a_rank_that_does_not_come_is_named() -> None:
    store = MemoryStore()
    agreement = Agreement(store, 0, 3, timedelta(seconds=0.05), MemoryRecord())
    with pytest.raises(CommunicationError, match="rank 0 has a new batch size, and ranks 1 and 2 did not make the same call"):
        agreement.agree("batch size", 8)


def test_a_failure_elsewhere_ends_the_question() -> None:
    store = MemoryStore()
    record = MemoryRecord()
    record.report(failure_of(1, ValueError("17")))
    agreement = Agreement(store, 0, 2, timedelta(seconds=10), record)
    with pytest.raises(CommunicationError, match="first failure: rank 1 failed: ValueError: 17"):
        agreement.agree("batch size", 8)


def test_a_rank_that_waits_in_another_call_is_named() -> None:
    """At once: it will not come to the question. One that has begun the same number of calls may still come."""
    store, record = MemoryStore(), MemoryRecord()
    ranks = [Agreement(store, rank, 2, timedelta(seconds=0.05), record) for rank in range(2)]
    for agreement in ranks:
        agreement.begin_call(1, "train_step")
    with pytest.raises(CommunicationError, match="did not make the same call"):
        ranks[1].agree("batch size", 8)
    ranks[0].begin_call(2, "a gathering")
    with pytest.raises(DisagreementError, match="call 2 is not the same on all ranks: rank 0 runs a gathering, rank 1 has batch size 8"):
        ranks[1].agree("batch size", 8)
    with pytest.raises(DisagreementError, match="rank 0 runs a gathering, rank 1 asks for the plan"):
        ranks[1].agree("plan", None)


def test_a_rank_whose_script_has_ended_is_named() -> None:
    store, record = MemoryStore(), MemoryRecord()
    record.ended = {1: "has ended its script"}
    agreement = Agreement(store, 0, 2, timedelta(seconds=10), record)
    with pytest.raises(CommunicationError, match="rank 1 did not make the same call: rank 1 has ended its script"):
        agreement.agree("batch size", 8)


def test_an_error_says_what_failed_first() -> None:
    lost = CommunicationError("rank 1 could not receive h_mb0 from rank 2: rank 2 has left")
    first = failure_of(1, lost)
    assert first.error_on(1, lost) is lost
    other = CommunicationError("rank 0 could not receive h_gradient_mb0 from rank 1")
    text = str(first.error_on(0, other))
    assert "rank 0 could not receive h_gradient_mb0 from rank 1" in text
    assert "first failure: rank 1 could not receive h_mb0 from rank 2" in text


def test_a_disagreement_is_the_error_of_every_rank() -> None:
    failure = Failure(2, "rank 2 has batch size 6, the others 8", disagreement=True)
    assert isinstance(failure.error_on(0, CommunicationError("rank 1 has left")), ConfigError)
