"""Do all ranks make the same calls, with the same batch? Compared on rank 0, behind the backs of the calls: nobody waits for it.

    call                    16                17                18
    rank 0       train_step, x 8a1f   train_step, x 03bc           ·
    rank 1       train_step, x 8a1f   train_step, x 77e0           ·         17: was given another x, since it skipped a step

Messages of one step look like those of the next, so that a rank which leaves out a step would go on beside the others, each with a batch of
its own. What tells is what the script passes, and how many steps its optimizer has made.
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

__all__ = ["CallTable", "Given", "RankCall", "rank_list", "sample_of"]

Given = str | int | list[float]
"""What is compared of one value: text and whole numbers exactly, a sample of real numbers to three digits."""

_SAMPLED = 64
"""How many elements of a tensor are compared: batches that differ do so nearly everywhere."""

_REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_COMPARED = frozenset((*_REAL, *_WHOLE))
"""The dtypes of which elements can be taken; batches seldom have another one."""

_PATIENCE = 0.3
"""Seconds that other ranks have to come to a call in which two differ: with them, the text can say which rank is the odd one."""


@dataclass(frozen=True)
class RankCall:
    """One call of one rank.

    Attributes:
        what: names the call.
        given: name -> what is compared of what was passed; a rank leaves out what it was not given.
        optimizer_steps: made before by each optimizer, each number once; nothing where this rank's parameters have not been optimized.
    """

    what: str
    given: Mapping[str, Given] = field(default_factory=dict)
    optimizer_steps: Sequence[int] = ()


@dataclass
class _Row:
    """One call of all ranks, as far as they have come to it.

    Attributes:
        calls: rank -> its call.
        given: name -> what the first rank that passed it was given.
        optimizer_steps: of the first rank that has made some.
        deadline: when ranks that have not come are no longer waited for; None while no two ranks differ.
    """

    calls: dict[int, RankCall] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    optimizer_steps: Sequence[int] = ()
    deadline: float | None = None

    def add(self, rank: int, call: RankCall) -> bool:
        """Note the call of a rank; whether it differs from those that were noted before."""
        self.calls[rank] = call
        differs = call.what != next(iter(self.calls.values())).what
        self.optimizer_steps = self.optimizer_steps or call.optimizer_steps
        differs |= not _shares_steps(self.optimizer_steps, call.optimizer_steps)
        for name, value in call.given.items():
            differs |= not _same(value, self.given.setdefault(name, value))
        return differs


class CallTable:
    """The calls of all ranks that are under way."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._absent: set[int] = set()
        self._rows: defaultdict[tuple[int, int], _Row] = defaultdict(_Row)

    def add(self, connection: int, number: int, rank: int, call: RankCall, now: float) -> str | None:
        """Note a call; returns how ranks differ in it, once that can be said."""
        row = self._rows[connection, number]
        if row.add(rank, call) and row.deadline is None:
            row.deadline = now + _PATIENCE
        return self.overdue(now, connection, number) if len(row.calls) == self._size - len(self._absent) else None

    def leave_out(self, rank: int) -> None:
        """Expect no calls of a rank that cannot tell of them."""
        self._absent.add(rank)

    def overdue(self, now: float, connection: int, number: int) -> str | None:
        """How ranks differ in a call, if all have come to it or had the time to; then it is forgotten."""
        row = self._rows[connection, number]
        if len(row.calls) < self._size - len(self._absent) and (row.deadline is None or now < row.deadline):
            return None
        del self._rows[connection, number]
        return None if row.deadline is None else difference(number, row.calls)

    def waiting(self) -> list[tuple[int, int]]:
        """The calls in which ranks differ and others may still come."""
        return [key for key, row in self._rows.items() if row.deadline is not None]


def difference(number: int, calls: Mapping[int, RankCall]) -> str | None:
    """In what ranks differ, naming the odd ones: ``in call 17 (train_step) rank 1 was given another x than the others``."""
    kinds = _clusters({rank: call.what for rank, call in calls.items()})
    if len(kinds) > 1:
        said = [f"{rank_list(ranks)} {'runs' if len(ranks) == 1 else 'run'} {calls[ranks[0]].what}" for ranks in kinds]
        return f"call {number} is not the same on all ranks: {', '.join(said)}"
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


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 2``, or ``ranks 2, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in sorted(ranks))}"


def _shares_steps(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether an optimizer of two ranks may be the same: a rank need not have parameters of each, nor each make a step every time."""
    return not one or not other or not set(one).isdisjoint(other)


def _clusters(values: Mapping[int, Any], same: Callable[[Any, Any], bool] | None = None) -> list[list[int]]:
    """The ranks with equal values, the fewest first."""
    same = same or _same
    found: list[list[int]] = []
    for rank, value in sorted(values.items()):
        for ranks in found:
            if same(values[ranks[0]], value):
                ranks.append(rank)
                break
        else:
            found.append([rank])
    return sorted(found, key=len)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        close = 1e-3 * max((abs(value) for value in (*one, *other) if math.isfinite(value)), default=0.0)
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(a == b or abs(a - b) <= close or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
    return bool(one == other)


@torch.no_grad()
def sample_of(tensor: Tensor) -> Given | None:
    """What is compared of a tensor; None for one on an accelerator, which would have to be waited for.

    Real numbers are compared to three digits: what each process computes from the same data may differ in the last ones.
    """
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.dtype in _COMPARED
    if not plain or tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    count = tensor.numel()
    places = torch.arange(0, count, max(1, count // _SAMPLED))[:_SAMPLED]
    sample = torch.take(tensor.detach(), places)
    if sample.dtype.is_floating_point:
        return [round(value, 9) if abs(value) < 1 else value for value in sample.double().tolist()]
    return hashlib.blake2b(repr((tuple(tensor.shape), sample.tolist())).encode(), digest_size=6).hexdigest()
