"""How long the messages of a pipeline are on their way: every value over every link, asked of the cost model once for all cuts.

stage 0 --(values that stages 1.. read)--> stage 1 --> ...
stage 0 <--(gradients of what stage 1 reads)-- stage 1 <-- ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Link
from partitioner.planner.solvers.stage_problem import Floats, Integers, Units

__all__ = ["MessageTimes"]


class MessageTimes:
    """Seconds of the messages of some units.

    Args:
        units: what crosses between them.
        links: from each stage to the next.

    Attributes:
        shares: (S,) the part of the messages between a stage and the next in which who receives computes nothing.
    """

    def __init__(self, units: Units, links: Sequence[Link], cost_model: CostModel) -> None:
        kinds = list(dict.fromkeys(links))
        self._n_stages = len(links) + 1
        self.shares = np.array([*(link.host_share for link in links), 0.0])
        self._link = np.array([kinds.index(link) for link in links], dtype=np.int64)
        self._leaving, self._entering = units.leaving, units.entering

        def seconds(sizes: Floats) -> Floats:
            distinct = {size: [cost_model.transfer_time(size, link) for link in kinds] for size in map(int, set(sizes.tolist()))}
            return np.array([distinct[int(size)] for size in sizes]).reshape(len(sizes), len(kinds))

        self._forward, self._back = seconds(self._leaving.amount), seconds(self._entering.amount)

    def of(self, stage_of: Integers) -> tuple[Floats, Floats]:
        """(S,) until what each stage sends forward has arrived, and the gradients that it sends back.

        Args:
            stage_of: (N + 1,) the stage of unit u at u + 1; -1 in front.
        """
        sender, reader = stage_of[self._leaving.before + 1], stage_of[self._leaving.unit + 1]
        goes = sender < reader
        sent = np.bincount(sender[goes], self._forward[goes, self._link[sender[goes]]], self._n_stages)
        sender, reader = stage_of[self._entering.before + 1], stage_of[self._entering.unit + 1]
        goes = sender < reader
        back = np.bincount(reader[goes], self._back[goes, self._link[reader[goes] - 1]], self._n_stages)
        return sent.astype(float), back.astype(float)
