"""Transfer times of a pipeline's messages: each value over each kind of link, priced once for all cuts.

stage 0 --(values that stages 1.. read)--> stage 1 --> ...
stage 0 <--(gradients of what stage 1 reads)-- stage 1 <-- ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Link
from partitioner.planner.solvers.stage_memory import Floats, Integers
from partitioner.planner.solvers.stage_problem import Units


class MessageTimes:
    """Seconds of the messages between units; ``links``: from each stage to the next.

    Attributes:
        shares: (S,) fraction of the transfer time to the next stage in which the receiver cannot compute.
    """

    def __init__(self, units: Units, links: Sequence[Link], cost_model: CostModel) -> None:
        kinds = list(dict.fromkeys(links))
        self._n_stages = len(links) + 1
        self.shares = np.array([*(link.host_share for link in links), 0.0])
        self._link = np.array([kinds.index(link) for link in links], dtype=np.int64)
        self._leaving, self._entering = units.leaving, units.entering

        def seconds(sizes: Floats) -> Floats:
            """Return (sizes, kinds of links)."""
            distinct = {size: [cost_model.transfer_time(size, link) for link in kinds] for size in map(int, set(sizes.tolist()))}
            return np.array([distinct[int(size)] for size in sizes]).reshape(len(sizes), len(kinds))

        self._forward, self._back = seconds(self._leaving.amount), seconds(self._entering.amount)

    def of(self, stage_of: Integers) -> tuple[Floats, Floats]:
        """Return (S,) seconds of the values that each stage sends forward, and of gradients sent back; ``stage_of``: of ``stages_of``."""
        sender, reader = stage_of[self._leaving.before + 1], stage_of[self._leaving.unit + 1]
        is_sent = sender < reader
        forward = np.bincount(sender[is_sent], self._forward[is_sent, self._link[sender[is_sent]]], self._n_stages)
        sender, reader = stage_of[self._entering.before + 1], stage_of[self._entering.unit + 1]
        is_sent = sender < reader
        back = np.bincount(reader[is_sent], self._back[is_sent, self._link[reader[is_sent] - 1]], self._n_stages)
        return forward.astype(float), back.astype(float)
