"""Compare the calls of all ranks, and their batches, on rank 0, in the background: no call waits for it.

    call                    16                17                18
    rank 0       train_step, x 8a1f   train_step, x 03bc           ·
    rank 1       train_step, x 8a1f   train_step, x 77e0           ·         17: another x, since it skipped a step

Messages of one step look like those of the next, so a rank that skips a step would go on with another batch than the others. The tensors
that the script passes, and the step count of its optimizer, reveal this.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.mesh import rank_list

Given = str | int | list[float]
"""The compared form of a value: text and integers are compared exactly, a sample of floats to three digits."""

_SAMPLED = 64
"""Number of elements of a tensor that are compared: batches that differ do so nearly everywhere."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_COMPARED = frozenset((*_FLOATS, *_INTEGERS))
"""The dtypes that are compared, those of which ``torch.take`` can sample elements."""

_PATIENCE = 0.3
"""Seconds to wait for the other ranks once two differ in a call: with their calls, the error can name the rank that deviates."""


@dataclass(frozen=True)
class RankCall:
    """One call of one rank.

    Attributes:
        what: names the call.
        given: name -> compared form of a tensor that was passed; a rank leaves out those that it was not given.
        optimizer_steps: the distinct step counts of its optimizers; empty if they have made no step.
    """

    what: str
    given: Mapping[str, Given] = field(default_factory=dict)
    optimizer_steps: Sequence[int] = ()


@dataclass
class _Row:
    """One call, of the ranks that have made it so far.

    Attributes:
        calls: rank -> its call.
        given: name -> compared form of the first rank that passed it.
        optimizer_steps: of the first rank that has made some.
        deadline: when the difference is reported without the missing ranks; None while no two ranks differ.
    """

    calls: dict[int, RankCall] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    optimizer_steps: Sequence[int] = ()
    deadline: float | None = None

    def add(self, rank: int, call: RankCall) -> bool:
        """Add the call of a rank; return whether it differs from an earlier one."""
        self.calls[rank] = call
        differs = call.what != next(iter(self.calls.values())).what
        self.optimizer_steps = self.optimizer_steps or call.optimizer_steps
        differs |= not _shares_steps(self.optimizer_steps, call.optimizer_steps)
        for name, value in call.given.items():
            differs |= not _is_same(value, self.given.setdefault(name, value))
        return differs


class CallTable:
    """The calls that not all of ``size`` ranks have made yet, by number of the connection and of the call."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._absent: set[int] = set()
        self._rows: defaultdict[tuple[int, int], _Row] = defaultdict(_Row)

    def add(self, connection: int, number: int, rank: int, call: RankCall, now: float) -> str | None:
        """Add a call of a rank at time ``now`` (monotonic); when all have made it, return the difference between ranks as text."""
        row = self._rows[connection, number]
        if row.add(rank, call) and row.deadline is None:
            row.deadline = now + _PATIENCE
        return self.overdue(now, connection, number) if len(row.calls) == self._size - len(self._absent) else None

    def leave_out(self, rank: int) -> None:
        """Expect no calls of a rank that cannot connect to rank 0."""
        self._absent.add(rank)

    def overdue(self, now: float, connection: int, number: int) -> str | None:
        """Return the difference between ranks in a call, if all have made it or its deadline is over; the call is then forgotten."""
        row = self._rows[connection, number]
        if len(row.calls) < self._size - len(self._absent) and (row.deadline is None or now < row.deadline):
            return None
        del self._rows[connection, number]
        return None if row.deadline is None else difference(number, row.calls)

    def waiting(self) -> list[tuple[int, int]]:
        """Return (connection, number) of the calls in which ranks differ and others are still awaited."""
        return [key for key, row in self._rows.items() if row.deadline is not None]


def difference(number: int, calls: Mapping[int, RankCall]) -> str | None:
    """Return the difference between ranks, None without one: ``in call 17 (train_step) rank 1 was given another x than the others``."""
    kinds = _clusters({rank: call.what for rank, call in calls.items()})
    if len(kinds) > 1:
        clauses = [f"{rank_list(ranks)} {'runs' if len(ranks) == 1 else 'run'} {calls[ranks[0]].what}" for ranks in kinds]
        return f"call {number} is not the same on all ranks: {', '.join(clauses)}"
    (what,) = {call.what for call in calls.values()}
    counts = _clusters({rank: call.optimizer_steps for rank, call in calls.items() if call.optimizer_steps}, _shares_steps)
    if len(counts) > 1:
        made = [
            f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} made {max(calls[ranks[0]].optimizer_steps)}" for ranks in counts
        ]
        return f"before call {number} ({what}) {', '.join(made)} steps of the optimizer: a step was skipped"
    for name in dict.fromkeys(name for call in calls.values() for name in call.given):
        parts = _clusters({rank: call.given[name] for rank, call in calls.items() if name in call.given})
        if len(parts) > 1:
            why = "a step was skipped, or the batches are not the same"
            if len(parts) == 2 and len(parts[0]) < len(parts[1]):
                were = "was" if len(parts[0]) == 1 else "were"
                return f"in call {number} ({what}) {rank_list(parts[0])} {were} given another {name} than the others: {why}"
            return f"in call {number} ({what}) {' and '.join(rank_list(ranks) for ranks in parts)} were given different {name}: {why}"
    return None


def _shares_steps(steps: Sequence[int], other_steps: Sequence[int]) -> bool:
    """Return whether two ranks share a step count: a rank may lack some optimizers, and not all step every time."""
    return not steps or not other_steps or not set(steps).isdisjoint(other_steps)


def _clusters(values: Mapping[int, Any], is_same: Callable[[Any, Any], bool] | None = None) -> list[list[int]]:
    """Group ranks with the same value; smallest group first."""
    is_same = is_same or _is_same
    clusters: list[list[int]] = []
    for rank, value in sorted(values.items()):
        for ranks in clusters:
            if is_same(values[ranks[0]], value):
                ranks.append(rank)
                break
        else:
            clusters.append([rank])
    return sorted(clusters, key=len)


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two compared forms match; lists of floats within 1e-3 of the largest finite magnitude."""
    if isinstance(value, list) and isinstance(other, list):
        tolerance = 1e-3 * max((abs(number) for number in (*value, *other) if math.isfinite(number)), default=0.0)
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(a == b or abs(a - b) <= tolerance or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
    return bool(value == other)


@torch.no_grad()
def sample_of(tensor: Tensor) -> Given | None:
    """Return the compared form of a tensor: a sample of floats, or a digest of sampled integers; None for a tensor that is not compared.

    Tensors on an accelerator are not, since reading them would wait for it.
    """
    is_comparable = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.dtype in _COMPARED
    if not is_comparable or tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    count = tensor.numel()
    places = torch.arange(0, count, max(1, count // _SAMPLED))[:_SAMPLED]
    sample = torch.take(tensor.detach(), places)
    if sample.dtype.is_floating_point:
        return [round(value, 9) if abs(value) < 1 else value for value in sample.double().tolist()]
    return hashlib.blake2b(repr((tuple(tensor.shape), sample.tolist())).encode(), digest_size=6).hexdigest()
