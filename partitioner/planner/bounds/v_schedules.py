"""Lower bounds of a step on a V schedule over all stage cuts: weighted means of paths through the schedule.

Rank r runs stage r, on the way down, and stage S-1-r, on the way up. A path through rank r is a chain of actions, each of which waits for
the one before it:

    before     forwards of the first microbatch through all stages before the rank's first stage, or before its second one
    on it      the rank's actions from there on: all, or all up to the last backward of its second stage, or of its first stage
    after      backwards of the last microbatch through the stages before that one, down to stage 0, and the last actions of rank 0

    two ranks, two microbatches, ZBV; one of the paths through rank 1, in capitals

    rank 0   0F0 0f1 ... 3f0 3i0 3w0 3f1 3i1 3w1 0i0 0w0 ... 0I1 0W1
    rank 1   ... 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1w1

A path contains each half of each stage a number of times, so its length is linear in the times of the stages. A step is at least as long as
any weighted mean of paths. In that mean a unit counts at least as in the stage where it counts least, so the sum over units of that is a
bound for all cuts. Any weights give a bound; those used are nearly the best for stages of equal time: a few mixtures of the kinds of paths,
and weights of ranks for which a second of work counts about the same in all stages.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np

from partitioner.planner.solvers.stage_memory import Floats
from partitioner.schedules.catalog import SCHEDULES
from partitioner.schedules.pattern import Rank, numbered
from passes.ir.schedule import ActionKind

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
"""(T, 2, 3) weights of the kinds of paths in T means; all are tried, as the best depends on the number of microbatches for each rank."""

_N_WITHOUT_BEHIND = 3
"""The first mixtures, which have no backwards of later ranks."""

_MOST_RANKS = 32
"""The most ranks for which the actions of later ranks are read from the schedule."""

_ROUNDS = 12
"""Number of adjustments of the weights of ranks."""

_STEP = 0.05
"""Fractions of halves are rounded to multiples of this, so that weights are cached for similar models."""


def least_on_v(name: str, n_ranks: int, count: int, halves: Floats, exchanged: tuple[float, float] = (0.0, 0.0)) -> float:
    """Return a lower bound of the seconds of a step.

    Args:
        count: microbatches.
        halves: (3, N, K) seconds of each unit's forward, and of the halves of its backward, for one microbatch, on kinds of devices.
        exchanged: seconds of all collectives inside stages, forward and backward, wherever they are.
    """
    of_units, forward_counts, backward_counts = _bounds_by_mean(name, n_ranks, count, halves.shape, halves.tobytes())
    return float((of_units + forward_counts * exchanged[0] + backward_counts * exchanged[1]).max())


@lru_cache(maxsize=4096)
def _bounds_by_mean(name: str, n_ranks: int, count: int, shape: tuple[int, ...], numbers: bytes) -> tuple[Floats, Floats, Floats]:
    """Return (T,) for each mean the bound by units, and the least count of a forward and of an input half over all stages.

    The array ``halves`` is given as ``shape`` and bytes (``numbers``), for the cache.
    """
    halves = np.frombuffer(numbers).reshape(shape)
    fractions = halves.min(axis=2).sum(axis=1)
    if not fractions.sum() > 0:
        return np.zeros(1), np.zeros(1), np.zeros(1)
    forward, inputs, _ = np.rint(fractions / fractions.sum() / _STEP).astype(int).tolist()
    counts = _counts_of_means(name, n_ranks, count, forward, inputs)
    of_units = np.tensordot(counts, halves.reshape(3, -1), (1, 0)).min(axis=1)  # (T, N K), in the stage where each counts least
    total = of_units.reshape(len(of_units), *halves.shape[1:]).min(axis=2).sum(axis=1)
    return total, counts[:, 0].min(axis=1), counts[:, 1].min(axis=1)


@lru_cache(maxsize=512)
def _counts_of_means(name: str, n_ranks: int, count: int, forward: int, inputs: int) -> Floats:
    """Return (T, 3, S) how often T means count each half of each stage, with weights for equal stages.

    ``forward`` and ``inputs`` are the fractions of time of forwards and of input halves, in units of ``_STEP``.
    """
    fractions = np.array([forward * _STEP, inputs * _STEP, 1 - (forward + inputs) * _STEP])
    paths = _Paths(name, n_ranks, count)
    weights = np.full((len(paths.mixtures), n_ranks), 1 / n_ranks)
    best, best_weights = np.full(len(weights), -np.inf), weights
    for _ in range(_ROUNDS):
        of_stages = np.tensordot(paths.counts(weights), fractions, (1, 0))
        least = of_stages.min(axis=1)
        best_weights = np.where((least > best)[:, None], weights, best_weights)
        best = np.maximum(best, least)
        of_ranks = np.minimum(of_stages[:, :n_ranks], of_stages[:, : n_ranks - 1 : -1])
        weights = np.maximum(weights + (of_ranks.mean(axis=1, keepdims=True) - of_ranks) / count / 2, 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
    return paths.counts(best_weights)


class _Paths:
    """The paths of ``count`` microbatches through each rank, of 2 x 3 kinds: from either stage, to its end or a last backward."""

    def __init__(self, name: str, n_ranks: int, count: int) -> None:
        forwards_ahead = SCHEDULES[name].forwards_ahead
        assert forwards_ahead is not None  # the order of the rank's forwards is known
        self.mixtures = _MIXTURES if n_ranks <= _MOST_RANKS else _MIXTURES[:_N_WITHOUT_BEHIND]
        left = np.zeros((3, 3, n_ranks, 2))  # (end of the path, half, rank, stage of the rank)
        self._is_whole = np.zeros(2 * n_ranks)
        if n_ranks <= _MOST_RANKS:
            left[1:], self._is_whole = _actions_left(name, n_ranks, min(count, 2 * n_ranks))
        self._last_of_rank_0 = left[2, :, 0]
        on_rank = np.full((2, 3, 3, n_ranks, 2), float(count)) - left  # (start of the path, end, half, rank, stage of the rank)
        ahead = np.minimum([forwards_ahead(n_ranks, rank) for rank in range(n_ranks)], count)
        on_rank[1, :, 0, :, 0] -= ahead
        self._on_rank = np.einsum("tbe,behrs->thrs", self.mixtures, on_rank)

    def counts(self, weights: Floats) -> Floats:
        """Return (T, 3, S) how often means count each half of each stage; ``weights``: (T, R) of the paths through each rank."""
        mixtures = self.mixtures[:, :, :, None]
        starts, ends = mixtures.sum(axis=2), mixtures.sum(axis=1)
        on_rank = self._on_rank * weights[:, None, :, None]
        counts = np.concatenate([on_rank[..., 0], on_rank[..., ::-1, 1]], axis=2)
        down = 1 - np.cumsum(weights, axis=1)  # for each stage of the way down, the weights of the ranks whose first stage is after it
        up = (np.cumsum(weights, axis=1) - weights)[:, ::-1]  # for each stage of the way up, those whose second stage is after it
        before_first, before_second = np.concatenate([down, 0 * up], axis=1), np.concatenate([0 * down + 1, up], axis=1)
        behind = ends[:, 1] * before_second + ends[:, 2] * before_first
        counts[:, 0] += starts[:, 0] * before_first + starts[:, 1] * before_second
        counts[:, 1] += behind
        counts[:, 2] += behind * self._is_whole
        counts[:, :, [0, -1]] += (ends[:, 1] + ends[:, 2])[:, :, None] * self._last_of_rank_0
        clipped: Floats = np.maximum(counts, 0.0)  # rounding can make zeros negative
        return clipped


@lru_cache(maxsize=256)
def _actions_left(name: str, n_ranks: int, count: int) -> tuple[Floats, Floats]:
    """Return the actions of each rank after the last backward of its second stage, and after that of its first stage.

    Returns:
        (2, 3, R, 2) how often each half of each of the rank's stages runs after it, and (S,) 1 if a stage's last backward is not split.
    """
    left, is_whole = np.zeros((2, 3, n_ranks, 2)), np.zeros(2 * n_ranks)
    for rank in range(n_ranks):
        moves = SCHEDULES[name].pattern(Rank(n_ranks, (0, 1), count, rank, n_ranks - 1 - rank))
        if count < 2 * n_ranks:  # some moves of the pattern have no microbatch
            moves = [(action.stage, action.kind) for action in numbered(moves, count)]
        for end, stage in enumerate((1, 0)):
            last = max(number for number, move in enumerate(moves) if move[0] == stage and move[1] in _SENDS_GRADIENT)
            is_whole[(rank, -1 - rank)[stage]] = moves[last][1] is ActionKind.BACKWARD
            for (later_stage, kind), number in Counter(moves[last + 1 :]).items():
                left[end, _HALVES[kind], rank, later_stage] += number
    return left, is_whole


_SENDS_GRADIENT = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
"""The actions that send a gradient to the stage before."""

_HALVES = {ActionKind.FORWARD: [0], ActionKind.BACKWARD_INPUT: [1], ActionKind.BACKWARD_WEIGHT: [2], ActionKind.BACKWARD: [1, 2]}
"""The halves of a stage that a move computes."""
