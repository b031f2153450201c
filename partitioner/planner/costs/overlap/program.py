"""The program of one rank: seconds that calls compute, and the messages that they start and wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from cost_models.simulator.contention import Passage
from cost_models.simulator.events import run_ranks
from cost_models.simulator.read_program import RankWork
from cost_models.simulator.tasks import Step, Transfer
from partitioner.planner.costs.overlap.messages import Activation, Message, by_place, passage_of
from partitioner.planner.solvers.stage_memory import Floats
from passes.emit.overlap_collectives import MOST_UNDER_WAY

Owner: TypeAlias = tuple[int, int, float]
"""Place of a call, direction, weight: as the arguments of ``Program.begin``."""


class Program:
    """The steps of one rank, as they are written, and the seconds that calls wait in them; ``activations``: as above."""

    def __init__(self, activations: Sequence[Activation]) -> None:
        self._activations = by_place(activations)
        self._made: dict[int, list[Activation]] = {}
        for each in activations:
            if each.maker is not None and each.forward:
                self._made.setdefault(each.maker, []).append(each)
        self._sent: dict[int, Transfer] = {}
        self._steps: list[Step] = []
        self._passages: list[Passage] = []
        self._owners: list[Owner] = []
        self._owner: Owner = (0, 0, 1.0)
        self._under_way: dict[bool, list[Message]] = {False: [], True: []}
        self._copies: list[tuple[Owner, float]] = []
        self._chained: list[Message] = []
        self._dimensions: dict[str, int] = {}

    def begin(self, place: int, direction: int, weight: float) -> None:
        """Begin with a call: what is appended next is computed, sent and waited for by it.

        Args:
            direction: 0: forward; 1: backward, or its input half; 2: its weight half.
            weight: how much its waits count.
        """
        self._owner = place, direction, weight

    def compute(self, seconds: float) -> None:
        """Append what a call computes."""
        if seconds > 0 and self._steps and self._steps[-1].kind == "compute":
            self._steps[-1].seconds += seconds
        elif seconds > 0:
            self._append("compute", seconds=seconds)

    def send(self) -> None:
        """Append the starts of the collectives of what a call has made in a forward."""
        for each in self._made.get(self._owner[0], ()):
            self._sent[id(each)] = transfer = self._transfer(passage_of(each.forward, 0.0, each.links), each.dimension)
            self._append("start", transfer)

    def exchange(self, beside: Callable[[], None] | None = None) -> None:
        """Append the collectives of values that a call waits for, or that its backward sends.

        Args:
            beside: appends what is computed while the first of them runs.
        """
        place, direction, _ = self._owner
        for each in self._activations.get(place, ()):
            seconds = (each.forward, each.backward)[direction > 0]
            if direction == 0 and id(each) in self._sent:
                self._append("wait", self._sent.pop(id(each)))
            elif seconds:
                transfer = self._transfer(passage_of(seconds, 0.0, each.links), each.dimension)
                if beside is not None and not each.is_beside:
                    beside()
                    beside = None
                self._append("start", transfer)
                if beside is not None:
                    beside()
                    beside = None
                self._append("wait", transfer)
        if beside is not None:
            beside()

    def start(self, message: Message) -> None:
        """Append the start of a message, and the copies that the rank makes for it, unless it has started."""
        if message.transfer is None:
            self.compute(message.copying)
            self._copies.append((self._owner, message.copying))
            message.transfer = self._transfer(message.passage, message.dimension)
            self._append("start", message.transfer)

    def start_all(self, messages: Iterable[Message]) -> None:
        """Append the starts of messages."""
        for message in messages:
            self.start(message)

    def gather(self, messages: Iterable[Message]) -> None:
        """Append the waits for gathers, each after the start of the next one."""
        for message in messages:
            if message.transfer is None:
                self.start(message)
            if message.following is not None and not message.is_awaited:
                self.start(message.following)
            self._wait(message)

    def reduce_all(self, messages: Iterable[Message]) -> None:
        """Append the starts of scatters and sums."""
        for message in messages:
            self.reduce(message)

    def reduce(self, message: Message) -> None:
        """Append the start of a scatter or a sum, and the waits for earlier ones of which too many are under way."""
        if not all(each.is_awaited for each in message.awaits):
            self._chained.append(message)
            return
        self.start(message)
        under_way = self._under_way[bool(message.awaits)]
        under_way.append(message)
        while len(under_way) > MOST_UNDER_WAY:
            self._wait_for_reduction(under_way.pop(0))

    def finish(self) -> None:
        """Append the waits for all that is under way."""
        for under_way in self._under_way.values():
            while under_way:
                self._wait_for_reduction(under_way.pop(0))

    def waiting(self, n_calls: int) -> Floats:
        """Return (3, P) seconds that calls wait on the clock of the simulator, in the directions of ``begin``."""
        run = run_ranks([RankWork(0, tuple(self._steps), (), ())], lambda transfer: self._passages[transfer.key])[0][0]
        waiting, now, computed = np.zeros((3, n_calls)), 0.0, iter(run.computed)
        ends = {int(each.name): each.end for each in run.transferred}
        for (place, direction, weight), seconds in self._copies:
            waiting[direction, place] += weight * seconds
        for step, (place, direction, weight) in zip(self._steps, self._owners, strict=True):
            if step.kind == "compute":
                each = next(computed)
                waiting[direction, place] += weight * (each.start - now)  # what its processor did meanwhile for a transfer
                now = each.end
            elif step.kind == "wait":
                assert step.transfer is not None
                end = max(now, ends[step.transfer.key])
                waiting[direction, place] += weight * (end - now)
                now = end
        place, direction, weight = self._owner
        waiting[direction, place] += weight * max(run.finish - now, 0.0)
        return waiting

    def _wait_for_reduction(self, message: Message) -> None:
        self._wait(message)
        ready = [each for each in self._chained if all(scatter.is_awaited for scatter in each.awaits)]
        self._chained = [each for each in self._chained if each not in ready]
        for each in ready:
            self.reduce(each)

    def _wait(self, message: Message) -> None:
        if not message.is_awaited:
            message.is_awaited = True
            self._append("wait", message.transfer)

    def _append(self, kind: Literal["compute", "start", "wait"], transfer: Transfer | None = None, seconds: float = 0.0) -> None:
        self._steps.append(Step(kind, "", "", seconds, transfer=transfer))
        self._owners.append(self._owner)

    def _transfer(self, passage: Passage, dimension: str) -> Transfer:
        self._passages.append(passage)
        group = -1 - self._dimensions.setdefault(dimension, len(self._dimensions))  # no rank: it waits for no others
        key = len(self._passages) - 1
        return Transfer(str(key), "collective", (group,), key, 0)
