"""The program of one rank: seconds that calls compute, and the messages that they start and wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cost_models.simulator.contention import Passage
from cost_models.simulator.events import run_ranks
from cost_models.simulator.read_program import RankWork
from cost_models.simulator.tasks import Step, Transfer
from partitioner.planner.costs.overlap.messages import Activation, Message, by_place, passage_of
from partitioner.planner.solvers.stage_memory import Floats
from passes.emit.overlap_collectives import MOST_UNDER_WAY

__all__ = ["Program"]


class Program:
    """The steps of one rank, as they are written, and the seconds that calls wait in them; ``activations``: as above."""

    def __init__(self, activations: Sequence[Activation]) -> None:
        self._activations = by_place(activations)
        self._steps: list[Step] = []
        self._passages: list[Passage] = []
        self._owners: list[tuple[int, int, float]] = []
        self._under_way: dict[bool, list[Message]] = {False: [], True: []}
        self._copies: list[tuple[int, int, float, float]] = []
        self._chained: list[Message] = []
        self._dimensions: dict[str, int] = {}

    def compute(self, place: int, direction: int, seconds: float, weight: float) -> None:
        """Append what a call computes.

        Args:
            direction: 0: forward; 1: backward, or its input half; 2: its weight half.
            weight: how much its waits count.
        """
        if seconds > 0 and self._steps and self._steps[-1].kind == "compute":
            self._steps[-1].seconds += seconds
        elif seconds > 0:
            self._steps.append(Step("compute", str(len(self._owners)), "", seconds))
            self._owners.append((place, direction, weight))

    def exchange(self, place: int, direction: int, beside: Callable[[], None] | None = None) -> None:
        """Append the collectives of values that a call waits for, or that its backward sends.

        Args:
            beside: appends what is computed while the first of them runs.
        """
        for each in self._activations.get(place, ()):
            seconds = (each.forward, each.backward)[direction]
            if seconds:
                transfer = self._transfer(passage_of(seconds, 0.0, each.links), each.dimension)
                if beside is not None and not each.is_beside:
                    beside()
                    beside = None
                self._steps.append(Step("start", "", "", transfer=transfer))
                if beside is not None:
                    beside()
                    beside = None
                self._steps.append(Step("wait", "", "", transfer=transfer))
        if beside is not None:
            beside()

    def gather(self, messages: Iterable[Message]) -> None:
        """Append the waits for gathers, each after the start of the next one."""
        for message in messages:
            if message.transfer is None:
                self._start(message)
            if message.following is not None and not message.is_awaited:
                self._start(message.following)
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
        self._start(message)
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
        """Return (3, P) seconds that calls wait on the clock of the simulator, in the directions of ``compute``."""
        run = run_ranks([RankWork(0, tuple(self._steps), (), ())], lambda transfer: self._passages[transfer.key])[0][0]
        waiting, end = np.zeros((3, n_calls)), 0.0
        for place, direction, weight, seconds in self._copies:
            waiting[direction, place] += weight * seconds
        for each in run.computed:
            place, direction, weight = self._owners[int(each.name)]
            waiting[direction, place] += weight * (each.start - end)
            end = each.end
        if self._owners:
            place, direction, weight = self._owners[-1]
            waiting[direction, place] += weight * max(run.finish - end, 0.0)
        return waiting

    def _wait_for_reduction(self, message: Message) -> None:
        self._wait(message)
        ready = [each for each in self._chained if all(scatter.is_awaited for scatter in each.awaits)]
        self._chained = [each for each in self._chained if each not in ready]
        for each in ready:
            self.reduce(each)

    def _start(self, message: Message) -> None:
        if message.transfer is None:
            place, direction, weight = self._owners[-1] if self._owners else (0, 0, 1.0)
            self.compute(place, direction, message.copying, weight)
            self._copies.append((place, direction, weight, message.copying))
            message.transfer = self._transfer(message.passage, message.dimension)
            self._steps.append(Step("start", "", "", transfer=message.transfer))

    def _wait(self, message: Message) -> None:
        if not message.is_awaited:
            message.is_awaited = True
            self._steps.append(Step("wait", "", "", transfer=message.transfer))

    def _transfer(self, passage: Passage, dimension: str) -> Transfer:
        self._passages.append(passage)
        group = -1 - self._dimensions.setdefault(dimension, len(self._dimensions))  # no rank: it waits for no others
        return Transfer(dimension, "collective", (group,), len(self._passages) - 1, 0)
