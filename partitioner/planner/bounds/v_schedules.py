"""How long a step on a V takes at least, whatever the cuts are: means of paths through its schedule, one for each way through each rank.

Rank r runs stage r, on the way down, and stage S-1-r, on the way up. A path through rank r is a chain of actions of which each waits for
the one before it:

    before     forwards of the first microbatch through all stages above the rank's first one, or above its second one
    on it      what the rank does from there on, in its order: all of it, or all up to the last backward of its second stage, or first one
    behind     backwards of the last microbatch through all stages above, down to stage 0, and what rank 0 has left to do then

    two ranks, two microbatches, ZBV; one of the paths through rank 1, in capitals

    rank 0   0F0 0f1 ... 3f0 3i0 3w0 3f1 3i1 3w1 0i0 0w0 ... 0I1 0W1
    rank 1   ... 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1w1

A path counts each half of each stage so many times: its length is linear in the times of the stages. No step is shorter than any mean of
paths, so a unit takes at least what it counts in that mean wherever it counts least; units are added up, each at its least. That is true of
every mean. The one that is used is nearly the best for stages that share a model's time evenly: kinds of paths in a few mixtures, ranks
weighed such that a second counts about the same in all stages.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np

from partitioner.planner.solvers.stage_problem import Floats
from partitioner.schedules.catalog import SCHEDULES
from partitioner.schedules.pattern import Rank, numbered
from passes.ir.schedule import ActionKind

__all__ = ["least_on_v"]

_MIXTURES = np.array(
    [  # from the first stage: all, up to the second's last backward, up to the first's; from the second stage: the same
        [[0.7, 0.0, 0.0], [0.3, 0.0, 0.0]],
        [[0.5, 0.0, 0.0], [0.5, 0.0, 0.0]],
        [[0.3, 0.0, 0.0], [0.7, 0.0, 0.0]],
        [[0.6, 0.4, 0.0], [0.0, 0.0, 0.0]],
        [[0.0, 0.7, 0.25], [0.0, 0.05, 0.0]],
        [[0.0, 0.2, 0.1], [0.0, 0.2, 0.5]],
        [[0.0, 0.55, 0.15], [0.1, 0.2, 0.0]],
        [[0.0, 0.1, 0.1], [0.0, 0.7, 0.1]],
    ]
)
"""(T, 2, 3) how much of each way through a rank is in a mean: all are tried, since the microbatches for each rank decide which is best."""

_N_TO_THE_END = 3
"""How many of them have no backwards behind a rank."""

_MOST_RANKS = 32
"""Ranks up to which what lies behind a rank is read off the schedule."""

_ROUNDS = 12
"""How often the weights of ranks are mended."""

_SHARE = 0.05
"""To which shares of halves are rounded, of the model for which weights are sought."""


def least_on_v(name: str, n_ranks: int, count: int, halves: Floats, exchanged: tuple[float, float] = (0.0, 0.0)) -> float:
    """Seconds of a step, at least.

    Args:
        count: microbatches.
        halves: (3, N, K) seconds of the forward of each unit and of the halves of its backward, for one microbatch, on kinds of devices.
        exchanged: seconds that units wait for the other ranks of their stages besides, forward and backward, whichever they are.
    """
    each, forwards, backwards = _least(name, n_ranks, count, halves.shape, halves.tobytes())
    return float((each + forwards * exchanged[0] + backwards * exchanged[1]).max())


@lru_cache(maxsize=4096)
def _least(name: str, n_ranks: int, count: int, shape: tuple[int, ...], numbers: bytes) -> tuple[Floats, Floats, Floats]:
    """Of each mean: what the units count at least, and how often a second of any stage does, forward and backward.

    Asked for again on every mesh whose microbatches are as large.
    """
    halves = np.frombuffer(numbers).reshape(shape)
    shares = halves.min(axis=2).sum(axis=1)
    if not shares.sum() > 0:
        return np.zeros(1), np.zeros(1), np.zeros(1)
    forward, inputs, _ = np.rint(shares / shares.sum() / _SHARE).astype(int).tolist()
    means = _means(name, n_ranks, count, forward, inputs)
    each = np.tensordot(means, halves.reshape(3, -1), (1, 0)).min(axis=1)  # (T, N K), each where it counts least
    units = each.reshape(len(each), *halves.shape[1:]).min(axis=2).sum(axis=1)
    return units, means[:, 0].min(axis=1), means[:, 1].min(axis=1)


@lru_cache(maxsize=512)
def _means(name: str, n_ranks: int, count: int, forward: int, inputs: int) -> Floats:
    """(T, 3, S) how often each half of each stage is counted, in means for units of such shares."""
    shares = np.array([forward * _SHARE, inputs * _SHARE, 1 - (forward + inputs) * _SHARE])
    paths = _Paths(name, n_ranks, count)
    weights = np.full((len(paths.mixtures), n_ranks), 1 / n_ranks)
    best, chosen = np.full(len(weights), -np.inf), weights
    for _ in range(_ROUNDS):
        each = np.tensordot(paths.counts(weights), shares, (1, 0))
        least = each.min(axis=1)
        chosen = np.where((least > best)[:, None], weights, chosen)
        best = np.maximum(best, least)
        lower = np.minimum(each[:, :n_ranks], each[:, : n_ranks - 1 : -1])
        weights = np.maximum(weights + (lower.mean(axis=1, keepdims=True) - lower) / count / 2, 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
    return paths.counts(chosen)


class _Paths:
    """The paths through each rank.

    Args:
        count: microbatches.
    """

    def __init__(self, name: str, n_ranks: int, count: int) -> None:
        forwards_ahead = SCHEDULES[name].forwards_ahead
        assert forwards_ahead is not None  # else nothing is known of the order
        self.mixtures = _MIXTURES if n_ranks <= _MOST_RANKS else _MIXTURES[:_N_TO_THE_END]
        left = np.zeros((3, 3, n_ranks, 2))
        self._whole = np.zeros(2 * n_ranks)
        if n_ranks <= _MOST_RANKS:
            left[1:], self._whole = _ends(name, n_ranks, min(count, 2 * n_ranks))
        self._last = left[2, :, 0]
        on_it = np.full((2, 3, 3, n_ranks, 2), float(count)) - left
        ahead = np.minimum([forwards_ahead(n_ranks, rank) for rank in range(n_ranks)], count)
        on_it[1, :, 0, :, 0] -= ahead
        self._on_it = np.einsum("tbe,behrs->thrs", self.mixtures, on_it)

    def counts(self, weights: Floats) -> Floats:
        """(T, 3, S) how often means count each half of each stage.

        Args:
            weights: (T, R) of the paths through each rank.
        """
        mixtures = self.mixtures[:, :, :, None]
        starts, ends = mixtures.sum(axis=2), mixtures.sum(axis=1)
        on_it = self._on_it * weights[:, None, :, None]
        counts = np.concatenate([on_it[..., 0], on_it[..., ::-1, 1]], axis=2)
        below = 1 - np.cumsum(weights, axis=1)  # weights of the ranks that have a stage of the way down above them
        above = (np.cumsum(weights, axis=1) - weights)[:, ::-1]  # weights of the ranks that have one of the way up in front of them
        first, second = np.concatenate([below, 0 * above], axis=1), np.concatenate([0 * below + 1, above], axis=1)
        behind = ends[:, 1] * second + ends[:, 2] * first
        counts[:, 0] += starts[:, 0] * first + starts[:, 1] * second
        counts[:, 1] += behind
        counts[:, 2] += behind * self._whole
        counts[:, :, [0, -1]] += (ends[:, 1] + ends[:, 2])[:, :, None] * self._last
        kept: Floats = np.maximum(counts, 0.0)  # sums of nothing are not exactly nothing
        return kept


@lru_cache(maxsize=256)
def _ends(name: str, n_ranks: int, count: int) -> tuple[Floats, Floats]:
    """What each rank has left to do after the last backward of its second stage, and of its first one: (2, 3, R, 2) halves of its stages.

    And (S,) 1 where that backward of a stage is whole.
    """
    left, whole = np.zeros((2, 3, n_ranks, 2)), np.zeros(2 * n_ranks)
    for index in range(n_ranks):
        moves = SCHEDULES[name].pattern(Rank(n_ranks, (0, 1), count, index, n_ranks - 1 - index))
        if count < 2 * n_ranks:  # some are left out
            moves = [(action.stage, action.kind) for action in numbered(moves, count)]
        for place, way in ((1, 0), (0, 1)):
            last = next(number for number in reversed(range(len(moves))) if moves[number][0] == place and moves[number][1] in _BACKWARDS)
            whole[(index, -1 - index)[place]] = moves[last][1] is ActionKind.BACKWARD
            for (stage, kind), number in Counter(moves[last + 1 :]).items():
                left[way, _HALVES[kind], index, stage] += number
    return left, whole


_BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
"""What sends a gradient on."""

_HALVES = {ActionKind.FORWARD: [0], ActionKind.BACKWARD_INPUT: [1], ActionKind.BACKWARD_WEIGHT: [2], ActionKind.BACKWARD: [1, 2]}
"""The halves of a stage that a move computes."""
