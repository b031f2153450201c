"""Processes that die, ranks that skip steps, links that are cut: every survivor ends soon, and says which rank it was.

What one process does by itself is held here quickly; each fault as a whole, in processes of its own, with the full matrices.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from benchmarks import fault_injection as faults
from partitioner.runtime.process import watch as watching
from partitioner.runtime.process.call_order import CallTable, RankCall, difference, sample_of
from partitioner.runtime.process.channel import Channel
from partitioner.runtime.process.failure import Failure
from partitioner.runtime.process.interruptible import Interruptible
from partitioner.runtime.process.local_marks import LocalMarks
from partitioner.runtime.process.watch import Watch
from passes.ir.errors import CommunicationError, ConfigError
from tests.partitioner.runtime.process.test_agreement import MemoryStore
from tests.support.processes import fault_cases as cases
from tests.support.processes.processes import Workers

with contextlib.suppress(ImportError):
    import fcntl  # not on Windows

PROMPTLY = 60.0
"""Seconds for what takes a fraction of one, on a machine that is busy; the waits themselves would last 300."""


# -- the same calls on all ranks -----------------------------------------------------------------------------------------------------


def test_the_odd_rank_is_named() -> None:
    given = {rank: RankCall("train_step", {"x": "a" if rank != 2 else "b"}) for rank in range(4)}
    said = "in call 7 (train_step) rank 2 was given another x than the others: a step was skipped, or the batches are not the same"
    assert difference(7, given) == said
    assert "rank 0 and rank 1 were given different x" in str(difference(7, {0: given[0], 1: given[2]}))
    other = {0: RankCall("train_step"), 1: RankCall("forward")}
    assert difference(7, other) == "call 7 is not the same on all ranks: rank 0 runs train_step, rank 1 runs forward"
    stepped = {0: RankCall("train_step", {}, [5]), 1: RankCall("train_step", {}, [2, 6]), 2: RankCall("train_step")}
    text = "before call 7 (train_step) rank 0 has made 5, rank 1 has made 6 steps of the optimizer: a step was skipped"
    assert difference(7, stepped) == text


def test_what_some_ranks_are_not_given_is_no_difference() -> None:
    calls = [RankCall("train_step", {"x": "a"}, [2, 3]), RankCall("train_step", {"target": "b"}, [3]), RankCall("train_step")]
    assert difference(1, dict(enumerate(calls))) is None


def test_calls_are_compared_when_all_have_come_or_had_the_time() -> None:
    table = CallTable(3)
    assert table.add(0, 1, 0, RankCall("train_step"), 0.0) is None
    assert table.add(0, 1, 1, RankCall("forward"), 0.0) is None
    assert table.overdue(0.1, 0, 1) is None
    assert table.waiting() == [(0, 1)]
    assert "rank 0 runs train_step, rank 1 runs forward" in str(table.overdue(9.0, 0, 1))
    assert table.waiting() == []
    for rank in range(3):
        assert table.add(0, 2, rank, RankCall("train_step", {"x": [1.0, 2.0]}), 0.0) is None


def test_samples_tell_batches_apart_and_not_their_last_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 50, generator=generator)

    def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
        samples = [sample_of(one), sample_of(other)]
        assert None not in samples
        sent = [json.loads(json.dumps(sample)) for sample in samples]  # as it travels
        return difference(1, {0: RankCall("f", {"x": sent[0]}), 1: RankCall("f", {"x": sent[1]})}) is not None

    assert not differ(x, x.clone())
    assert not differ(x, x * (1 + 1e-6))
    assert not differ(x, x.t().contiguous().t())
    assert differ(x, torch.randn(100, 50, generator=generator))
    assert not differ(x / 0, x / 0)
    tokens = torch.randint(0, 1000, (8, 128), generator=generator)
    assert not differ(tokens, tokens.clone())
    assert differ(tokens, tokens + 1)
    assert not differ(x.bfloat16(), x.bfloat16())
    assert not differ(x > 0, x > 0)
    assert sample_of(torch.empty(0)) is None
    assert sample_of(torch.empty(2, device="meta")) is None


@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", [pytest.param("pipeline", marks=pytest.mark.slow), "fsdp"])
def test_a_rank_that_skips_a_step_is_refused_by_all(workers: Callable[[int], Workers], mode: str) -> None:
    for answer in workers(2).call(cases.skip_a_step, mode, timeout=PROMPTLY):
        assert isinstance(answer.error, ConfigError)
        assert re.search(r"in call \d+ \(train_step of model \d+\) rank 0 and rank 1 were given different input", str(answer.error))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_a_rank_that_steps_its_optimizer_alone_is_refused_by_all(workers: Callable[[int], Workers]) -> None:
    """The batch is always the same: it shows nothing."""
    for answer in workers(2).call(cases.skip_a_train_step, timeout=PROMPTLY):
        assert isinstance(answer.error, ConfigError)
        assert "rank 0 has made 2, rank 1 has made 3 steps of the optimizer" in str(answer.error)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["pipeline", "fsdp"])
def test_ranks_in_different_calls_do_not_wait_for_each_other(workers: Callable[[int], Workers], mode: str) -> None:
    """One has skipped a step whose batch shows nothing, and gathers the weights where the other trains on."""
    for answer in workers(2).call(cases.end_a_step_early, mode, timeout=PROMPTLY):
        assert isinstance(answer.error, ConfigError)
        assert re.search(r"call \d+ is not the same on all ranks", str(answer.error))
        assert "rank 1 runs a gathering of the tensors of all ranks" in str(answer.error)


SAID_ALONE = {
    "state_dict": r"call \d+ is not the same on all ranks: rank 0 runs a gathering of the tensors of all ranks, rank 1 has program forward",
    "optimizer": r"call \d+ is not the same on all ranks: rank 0 runs a gathering of the tensors of all ranks, rank 1 has program forward",
    "norm": r"call \d+ is not the same on all ranks: rank 0 runs a reduction over all ranks, rank 1 has program forward",
    "no backward": r"rank 0 (has program|runs) forward .*rank 1 (has|runs) (program )?backward",
}
"""Errors of all ranks where rank 0 acts alone."""


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize("call", SAID_ALONE)
def test_a_call_of_one_rank_beside_forward_and_backward_is_refused_by_all(workers: Callable[[int], Workers], call: str) -> None:
    """The others have a new program, forward after backward, and ask rank 0 for it: they must not wait until it answers."""
    for answer in workers(2).call(cases.call_alone, call, "fsdp", timeout=PROMPTLY):
        assert isinstance(answer.error, ConfigError)
        assert re.search(SAID_ALONE[call], str(answer.error))


@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_a_group_that_the_script_has_made_counts_as_torchrun(workers: Callable[[int], Workers]) -> None:
    """As ``mp.spawn`` leaves it: nothing in the environment."""
    assert workers(2).values(cases.without_environment) == [[0], [1]]


@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["data", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("tensor", "fsdp", "pipeline"))])
def test_processes_of_unlike_seeds_take_the_values_of_rank_0(workers: Callable[[int], Workers], mode: str) -> None:
    """A script need not set a seed: replicas, and parts of one parameter, are nevertheless those of one model."""
    for rank, (alike, apart, loss, said) in enumerate(workers(2).values(cases.unlike_values, mode)):
        assert alike
        assert apart == 0.0
        assert loss < 1e-12
        assert said == ([cases.__file__] if rank == 0 else [])


# -- watching ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched() -> Iterator[Callable[[int], list[Watch]]]:
    """Yield the watches of so many ranks, connected, all in this process."""
    made: list[Watch] = []

    def start(size: int) -> list[Watch]:
        store = MemoryStore()
        made.extend(Watch(store, rank, size, "127.0.0.1", 60.0) for rank in range(size))
        _wait_until(lambda: len(made[0]._channels) == size - 1 and all(each._channels for each in made))
        return made

    yield start
    for each in made:
        each.close()


def _wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_hear_of_a_process_that_is_gone(watched: Callable[[int], list[Watch]]) -> None:
    watches = watched(4)
    ended = threading.Event()
    watches[3].on_failure(5, ended.set)
    watches[2].close()  # as its kernel does when a process dies
    for rank in (0, 1, 3):
        failure = watches[rank].await_first(5)
        assert failure is not None
        assert failure.lost
        assert failure.text == "rank 2 has left: the process was killed, or ended without a word"
    assert ended.wait(20)


def test_all_hear_that_rank_0_is_gone(watched: Callable[[int], list[Watch]]) -> None:
    watches = watched(3)
    watches[0].close()  # as its kernel does when a process dies
    for rank in (1, 2):
        failure = watches[rank].await_first(0)
        assert failure is not None
        assert failure.rank == 0


def test_the_first_failure_is_that_of_all(watched: Callable[[int], list[Watch]]) -> None:
    watches = watched(3)
    first = watches[2].report(0, Failure(2, "rank 2 failed: ValueError: 17"))
    for rank in (0, 1):
        assert watches[rank].report(0, Failure(rank, "a consequence")) == first
    assert watches[1].first(1) is None  # another connection, made after the failure


def test_a_script_that_has_ended_is_no_failure(watched: Callable[[int], list[Watch]]) -> None:
    watches = watched(3)
    watches[1].leave("has ended its script")
    _wait_until(lambda: all(watches[rank].left() == {1: "has ended its script"} for rank in (0, 2)))
    watches[1].close()  # as its kernel does when a process dies
    time.sleep(0.1)
    assert watches[0].first(0) is None
    assert watches[2].first(0) is None


def test_a_difference_in_calls_is_told_to_all(watched: Callable[[int], list[Watch]]) -> None:
    watches = watched(2)
    watches[0].announce(3, 1, RankCall("train_step", {"x": "a"}))
    watches[1].announce(3, 1, RankCall("train_step", {"x": "b"}))
    for watch in watches:
        failure = watch.await_first(3)
        assert failure is not None
        assert failure.disagreement


def test_a_rank_that_did_not_come_is_named() -> None:
    store = MemoryStore()
    watch = Watch(store, 0, 3, None, 60.0)
    store.set("came 1", "null")
    with pytest.raises(CommunicationError, match=r"rank 0 waits in partition\(\) .* rank 2 did not call partition\(\) within 0 s"):
        watch.await_all(store, timedelta(seconds=0.05), list)
    watch.close()


def test_a_rank_that_came_and_went_before_it_could_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_CONNECTING", 0.2)
    store = MemoryStore()
    watch = Watch(store, 0, 3, None, 60.0)
    store.set("came 1", "null")
    with pytest.raises(CommunicationError, match="rank 1 has left: the process was killed"):
        watch.await_all(store, timedelta(seconds=60), list)
    watch.close()


def test_a_rank_that_cannot_be_watched_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network lets it reach the store, and not rank 0."""
    monkeypatch.setattr(watching, "_CONNECTING", 0.2)
    monkeypatch.setattr(watching, "connect", _no_route)
    monkeypatch.setattr(threading.Thread, "start", lambda _thread: None)
    store = MemoryStore()
    store.set("came 0", json.dumps([["192.0.2.1"], 1, "token"]))
    watch = Watch(store, 1, 2, None, 60.0)
    with pytest.warns(UserWarning, match="rank 1 cannot connect to rank 0 at 192.0.2.1"):
        assert watch._connect() is None
    assert json.loads(store.get("came 1")) == "alone"
    assert watch.first(0) is None


def _no_route(*_: object) -> None:
    raise OSError("no route")


def test_strangers_are_not_listened_to(watched: Callable[[int], list[Watch]]) -> None:
    watches = watched(2)
    addresses, port, _ = json.loads(watches[0]._store.get("came 0"))
    with socket.create_connection((addresses[-1], port), timeout=20) as stranger:
        stranger.sendall(b'{"rank": 1, "token": "guessed"}\n{"lost": 1, "why": "I say so"}\n')
        stranger.settimeout(20)
        assert stranger.recv(100) == b""
    with socket.create_connection((addresses[-1], port), timeout=20) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n\n")
        stranger.settimeout(20)
        assert stranger.recv(100) == b""
    assert watches[0].first(0) is None


def test_a_call_that_blocks_ends_with_a_failure() -> None:
    failure: list[Failure] = []
    for_ever = threading.Event()
    calls = Interruptible(0, lambda: failure[0] if failure else None, lambda: failure[0] if failure else None)
    assert calls.run("count", lambda: 3) == 3
    failure.append(Failure(2, "rank 2 has left: killed", lost=True))
    with pytest.raises(CommunicationError, match="rank 0 could not connect with rank 2: rank 2 has left: killed"):
        calls.run("connect with rank 2", for_ever.wait)
    assert calls.run("count", lambda: 4) == 4  # on another thread
    for_ever.set()
    failure.clear()
    with pytest.raises(CommunicationError, match="rank 0 could not reach the store: broken pipe"):
        calls.run("reach the store", _broken)
    with pytest.raises(KeyError):
        calls.run("look", _lacking)


def _lacking() -> None:
    raise KeyError("nothing")


def _broken() -> None:
    raise RuntimeError("broken pipe\nand a stack of frames")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes leave marks on Linux alone")
def test_marks_tell_who_has_died_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = (LocalMarks("localhost:1", rank, 3) for rank in range(2))
    assert first.dead() == second.dead() == []
    assert second._descriptor is not None
    os.close(second._descriptor)  # as the kernel does
    assert first.dead() == [1]
    again = LocalMarks("localhost:1", 1, 3)  # it was started again
    assert first.dead() == []
    again.remove()
    assert first.dead() == []
    first.remove()
    assert not list(tmp_path.iterdir())
    assert LocalMarks("localhost:1", 0, 3).dead() == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes leave marks on Linux alone")
def test_marks_of_an_earlier_run_mean_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = LocalMarks("localhost:1", 1, 2)
    assert old._descriptor is not None
    os.close(old._descriptor)
    (mark,) = tmp_path.glob("*/rank-1")
    os.utime(mark, (1.0, 1.0))
    assert LocalMarks("localhost:1", 0, 2).dead() == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes leave marks on Linux alone")
def test_a_mark_appears_with_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check between making a mark and locking it would take its process for dead."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watcher = LocalMarks("localhost:1", 0, 2)
    dead: list[list[int]] = []
    lock = fcntl.flock

    def inspected(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            dead.append(watcher.dead())
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", inspected)
    marks = LocalMarks("localhost:1", 1, 2)
    assert dead == [[]]
    marks.remove()
    watcher.remove()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked on Unix alone")
def test_forked_children_do_not_hold_connections() -> None:
    """The worker of a loader outlives a rank that is killed: that rank's connection closes nevertheless."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = Channel(socket.create_connection(listener.getsockname()), 60.0)
        other = listener.accept()[0]
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        os.write(writer, b"1")  # after what runs in a child that has been forked
        time.sleep(60)
        os._exit(0)
    try:
        os.read(reader, 1)
        channel.close()
        other.settimeout(20)
        assert other.recv(1) == b""
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        other.close()


# -- each fault as a whole -----------------------------------------------------------------------------------------------------------


def nodes() -> set[str]:
    """Return the existing network namespaces."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(400)
class TestFaults:
    """Processes of their own, under torchrun or without it. Limits allow for a busy machine; ``benchmarks.faults`` measures."""

    @pytest.mark.parametrize("rank", [1, 0])
    def test_killed_in_partition(self, rank: int) -> None:
        found = faults.outcome("killed_in_partition", str(rank), limit=PROMPTLY)
        assert len(found.survivors) == 3
        for ending in found.survivors:
            assert ending.code == 1, ending.output
            assert ending.said.startswith("CommunicationError"), ending.output
            assert f"rank {rank} has left" in ending.said

    @pytest.mark.parametrize("mode", ["pipeline", "data", "fsdp"])
    def test_killed_in_training(self, mode: str) -> None:
        found = faults.outcome("killed", mode, limit=PROMPTLY)
        assert len(found.survivors) == 3
        for ending in found.survivors:
            assert re.match(rf"CommunicationError: rank {ending.rank} could not .*: rank 2 has left: the process was killed", ending.said)

    @pytest.mark.parametrize("case", ["skips_a_step", "skips_a_train_step"])
    @pytest.mark.parametrize("mode", ["pipeline", "fsdp"])
    def test_skipped_step(self, case: str, mode: str) -> None:
        for ending in faults.outcome(case, mode, limit=PROMPTLY).endings:
            assert "DisagreementError" in ending.said, ending.output
            assert "rank 1" in ending.said

    def test_cut_link(self) -> None:
        if (reason := faults.can_make_nodes()) is not None:
            pytest.skip(reason)
        before = nodes()
        found = faults.cut_link(timeout=20.0, limit=PROMPTLY)
        for ending in found.endings:
            assert ending.said.startswith("CommunicationError"), ending.output
            other = "[23]" if ending.rank < 2 else "[01]"
            assert re.search(rf"rank {other} has left: nothing has been heard for 10 s", ending.said)
        assert nodes() == before

    def test_nodes_go_when_something_fails(self) -> None:
        if (reason := faults.can_make_nodes()) is not None:
            pytest.skip(reason)
        before = nodes()
        with pytest.raises(KeyError):
            self._fail_beside_nodes(before)
        assert nodes() == before

    def _fail_beside_nodes(self, before: set[str]) -> None:
        with faults.two_nodes():
            assert len(nodes() - before) == 2
            raise KeyError

    def test_two_restarts(self, tmp_path: Path) -> None:
        expected = faults.train(tmp_path / "whole", restarts=0)
        found = faults.train(tmp_path / "killed", "--kill", "7", "12", restarts=3)
        assert found.has_losses_of(expected), found.output
        assert found.first_steps == (1, 7, 10)
        assert len(expected.losses) == 16

    def test_killed_while_saving(self, tmp_path: Path) -> None:
        expected = faults.train(tmp_path / "whole", restarts=0)
        script = ("-m", "benchmarks.fault_injection", "killed_while_saving")
        found = faults.train(tmp_path / "killed", restarts=1, script=script)
        assert found.has_losses_of(expected), found.output
        assert found.first_steps == (1, 7)  # of the checkpoints after steps 6 and 9 only that one was whole

    def test_full_disk(self, tmp_path: Path) -> None:
        if (reason := faults.can_make_nodes()) is not None:
            pytest.skip(f"a small disk is for root: {reason}")
        expected = faults.train(tmp_path, restarts=None)
        with faults.small_disk(kilobytes=240) as (folder, make_room):
            failed = faults.train(folder, restarts=None)
            assert "No space left on device" in failed.output
            last = failed.checkpoints[-1]
            make_room()
            found = faults.train(folder, restarts=None)
        assert found.first_steps == (int(last.removeprefix("step-")) + 1,)
        assert failed.losses | found.losses == expected.losses

    def test_mp_spawn(self) -> None:
        (script,) = faults.outcome("spawns", limit=120).endings
        assert script.code == 0, script.output
        held = re.findall(r"rank (\d) holds (\d) of 8 parameters, losses (.*)", script.output)
        assert {rank for rank, _, _ in held} == {"0", "1"}
        assert sum(int(count) for _, count, _ in held) == 8
        assert len({losses for _, _, losses in held}) == 1
