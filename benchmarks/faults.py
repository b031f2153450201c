"""Behaviour under faults: each in processes of its own, with the time and the message of every survivor.

    python -m benchmarks.faults

Two times are printed: until the error of the last survivor, and until the end of its process, which Python takes its time for. Times depend
on what else the machine does meanwhile; four processes that import torch keep two cores busy for some seconds.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.fault_injection import Outcome, can_make_nodes, cut_link, outcome, small_disk, train
from benchmarks.rounds import say

LINK_TIMEOUT = 20.0


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        fault: what is done.
        seconds: until the last error, and the end of the last survivor; None where nothing ends.
        said: by each survivor, alike ones once.
        reach: what is to hold.
        holds: whether it does.
    """

    fault: str
    seconds: tuple[float, float] | None
    said: Sequence[str]
    reach: str
    holds: bool


def _of_outcome(fault: str, found: Outcome, reach: str, within: float, said: str) -> Row:
    """Return the row of a fault that every survivor should end with, saying something, within so many seconds."""
    raised = [ending.raised for ending in found.survivors if ending.raised is not None]
    holds = len(raised) == len(found.survivors) and found.seconds < within and all(re.search(said, end.said) for end in found.survivors)
    texts = [f"{end.rank}: {end.said}" for end in found.survivors]
    return Row(fault, (max(raised, default=float("nan")), found.seconds), texts, reach, holds)


def _skipped(mode: str) -> Row:
    said = "DisagreementError: in call 6 .*rank 1 was given another input"
    found = _of_outcome(f"rank 1 skips a step, {mode}", outcome("skips_a_step", mode), "refused by all, < 5 s", 60, said)
    return replace(found, holds=found.holds and found.seconds is not None and found.seconds[0] < 5)  # what is refused need not end


def _killed(mode: str) -> Row:
    said = "CommunicationError: rank [013] could not .*: rank 2 has left"
    return _of_outcome(f"rank 2 of 4 is killed, {mode}", outcome("killed", mode), "all name it, < 10 s", 10, said)


def _killed_in_partition(rank: int) -> Row:
    found = outcome("killed_in_partition", str(rank))
    reach = "all name it, < 15 s"
    return _of_outcome(f"rank {rank} is killed in partition()", found, reach, 15, f"CommunicationError: .*rank {rank} has left")


def _link() -> Row:
    fault, reach = "link of two nodes is cut", f"both name a peer, < {LINK_TIMEOUT:.0f} s"
    if (reason := can_make_nodes()) is not None:
        return Row(fault, None, [reason], reach, holds=False)
    said = "CommunicationError: .*rank [0-3] has left: nothing has been heard"
    return _of_outcome(fault, cut_link(LINK_TIMEOUT), reach, LINK_TIMEOUT, said)


def _spawned() -> Row:
    (script,) = outcome("spawns", limit=120).endings
    lines = [line for line in script.output.splitlines() if line.startswith("rank ")]
    held = [int(count) for count in re.findall(r"holds (\d) of 8", script.output)]
    alike = len({line.partition("losses")[2] for line in lines}) == 1
    return Row("a script with mp.spawn", None, lines, "one rank a process", script.code == 0 and alike and sorted(held) == [2, 6])


def _restarted() -> Row:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        expected, found = train(Path(one), restarts=0), train(Path(other), "--kill", "7", "12", restarts=3)
    said = [f"attempts began with steps {', '.join(map(str, found.first_steps))}; {len(found.losses)} losses"]
    holds = found.has_losses_of(expected) and len(found.losses) == 16 and len(found.first_steps) == 3
    return Row("--max-restarts, two kills", None, said, "bit-equal losses", holds)


def _killed_while_saving() -> Row:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        expected = train(Path(one), restarts=0)
        found = train(Path(other), restarts=1, script=("-m", "benchmarks.fault_injection", "killed_while_saving"))
    said = [f"attempts began with steps {', '.join(map(str, found.first_steps))}; {len(found.losses)} losses"]
    holds = found.has_losses_of(expected) and found.first_steps == (1, 7)
    return Row("killed while saving", None, said, "the one before is found", holds)


def _full_disk() -> Row:
    fault, reach = "disk full while saving", "the one before is found"
    if (reason := can_make_nodes()) is not None:
        return Row(fault, None, [reason], reach, holds=False)
    with tempfile.TemporaryDirectory() as one, small_disk(kilobytes=240) as (folder, make_room):
        expected, failed = train(Path(one), restarts=None), train(folder, restarts=None)
        make_room()
        found = train(folder, restarts=None)
    last = max(failed.losses)
    losses = failed.losses | found.losses
    holds = "No space left" in failed.output and last < 16 and 1 < found.first_steps[0] <= last and losses == expected.losses
    said = [f"ended after step {last}: no space left; then began with step {found.first_steps[0]}, from {failed.checkpoints[-1]}"]
    return Row(fault, None, said, reach, holds)


def faults() -> bool:
    """Print the table; whether all holds."""
    measures: list[Callable[[], Row]] = [
        *(lambda rank=rank: _killed_in_partition(rank) for rank in (1, 0)),
        *(lambda mode=mode: _skipped(mode) for mode in ("pipeline", "fsdp")),
        *(lambda mode=mode: _killed(mode) for mode in ("pipeline", "data", "fsdp")),
        _link,
        _restarted,
        _killed_while_saving,
        _full_disk,
        _spawned,
    ]
    say(f"{'fault':<36}{'raised':>9}{'ended':>9}  {'reach':<28}{'holds'}")
    held = []
    for measure in measures:
        row = measure()
        raised, ended = ("", "") if row.seconds is None else (f"{each:.1f} s" for each in row.seconds)
        say(f"{row.fault:<36}{raised:>9}{ended:>9}  {row.reach:<28}{'yes' if row.holds else 'NO'}")
        for line in row.said:
            say(f"    {line}")
        held.append(row.holds)
    return all(held)


if __name__ == "__main__":
    raise SystemExit(0 if faults() else 1)
