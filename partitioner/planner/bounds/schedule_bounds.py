"""How long a step takes at least, whatever the cuts are: closed forms in the times of the units.

With W the time of all units for one microbatch, M microbatches, R ranks, and L the load of the fullest rank, at least:

    any schedule     M L                               the fullest rank works all the time
                     W                                 a microbatch goes through all stages and back; less the weight halves, if split
    GPipe            W + (M - 1) L                     its first microbatch comes, its last one goes on
    1F1B             2 W + (M - R - 1) L    M > R      path D of ``path_costs`` through the slowest stage: what is in front of it takes no
                                                       longer than as many such stages would
                     W / (1 - (1 - 1/M)^R)             path A, at its shortest where it is equally long through all stages
    backward whole   W + (M - 1) b L'                  path C; b: the least share that a backward has of its unit, L' the slowest stage
    ZB1P             f W / (1 - (1 - f/M)^R)           only forwards precede; f: the least share that a forward has
    in a loop        about (M + (R - 1) / 4) W / R     of two rounds: see ``_fill_of_loop``
    on a V           about (M + f (R - 1) / 4) W / R   ranks begin one after the other; more where M < 2 R: see ``fill_of_v``

``L >= W / R``, but units are not divided: of 96 blocks and a head on 16 ranks, some rank has six blocks and the head, or seven blocks.

What ranks of a stage exchange is part of the stage's time, and W has it, but which stages exchange how much is not known: that of a split
backward counts as often as it does where it counts least.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from partitioner.planner.bounds.v_schedules import least_on_v
from partitioner.planner.costs.time_fractions import TimeFractions
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.solvers.stage_problem import Floats
from partitioner.schedules.catalog import SCHEDULES

__all__ = ["least_load", "least_shared_step", "least_step"]

_ALIKE = 1e-9
"""Relative differences up to which sums of units are the same."""

_MOST_SUMS = 600
"""Distinct sums of runs up to which those of several runs are told apart."""


def least_load(seconds: Floats, n_parts: int, n_runs: int) -> float:
    """What the fullest of so many parts holds at least, when units are dealt out whole.

    Units that are as long as no fewer than ``n_parts`` others are common, c seconds of them together. What a part of length T holds of
    them is a sum of as many runs as it has, no more than F(T), the largest such sum; the part that holds the longest other unit, x, has no
    more than F(T - x). So T is the least with ``(n_parts - 1) F(T) + F(T - x) >= c``.

    Args:
        seconds: (N,) of each unit.
        n_parts: ranks, or stages.
        n_runs: runs of units in each part, at most.
    """
    longest = float(seconds.max(initial=0.0))
    evenly = max(float(seconds.sum()) / n_parts, longest)
    unit = longest * _ALIKE
    if unit <= 0 or n_parts == 1:
        return evenly
    rounded = np.round(seconds / unit)
    _, place, counts = np.unique(rounded, return_inverse=True, return_counts=True)
    common = counts[place] >= n_parts
    most = 2 * evenly / unit
    sums = _sums_of_runs(rounded[common], most)  # whatever other units lie between
    if len(sums) > _MOST_SUMS:
        return evenly
    several = sums
    for _ in range(n_runs - 1):
        several = np.unique(np.add.outer(several, sums))
    other = float(rounded[~common].max(initial=0.0))
    lengths = np.unique(np.concatenate([[evenly / unit], several, several + other]))
    lengths = lengths[(lengths >= evenly / unit) & (lengths < most)]  # within which all sums are known
    held = _largest(several, lengths) * (n_parts - 1) + _largest(several, lengths - other)
    enough = lengths[held >= rounded[common].sum() - 2 * len(seconds)]
    return max(evenly, float(enough[0]) * unit * (1 - 1e3 * _ALIKE)) if len(enough) else evenly


def _largest(sums: Floats, within: Floats) -> Floats:
    """The largest sum within each length; less than nothing where there is none."""
    places = np.searchsorted(sums, within + 0.5, side="right") - 1
    return np.where(places >= 0, sums[places], -np.inf)


def _sums_of_runs(lengths: Floats, most: float) -> Floats:
    """The distinct sums of consecutive units, none of them among it."""
    ends = np.concatenate([[0.0], np.cumsum(lengths)])
    between = np.subtract.outer(ends, ends)
    return np.unique(between[(between >= 0) & (between <= most)])


def least_step(
    candidate: Candidate,
    n_ranks: int,
    whole: float,
    load: float,
    slowest: float,
    shares: TimeFractions,
    exchanged: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Seconds of a step.

    Args:
        whole: seconds of all units, for one microbatch.
        load: of the fullest rank.
        slowest: of the slowest stage.
        exchanged: seconds that all stages together wait for the ranks beside them, for one microbatch, forward and backward.
    """
    count, alone, forward = candidate.n_microbatches, candidate.stages_per_rank == 1, shares.forward[0]
    kind = SCHEDULES[candidate.schedule]
    every = whole + sum(exchanged)
    load = max(load, every / n_ranks)
    step = max(whole * shares.through + sum(exchanged) if kind.splits_backward else every, count * load)
    if not kind.splits_backward:
        if alone and kind.forwards_first:
            return max(step, every + (count - 1) * load)
        step = max(step, every + (count - 1) * shares.backward * slowest)
        if alone:
            step = max(step, every / (1 - (1 - 1 / count) ** n_ranks))
            return max(step, 2 * every + (count - n_ranks - 1) * load) if kind.alternates and count > n_ranks else step
    elif alone and forward > 0:
        left = 1 - forward / count
        counting = whole + exchanged[0] + exchanged[1] * left ** (n_ranks - 1)  # where it counts least: on the first rank
        return max(step, counting * forward / (1 - left**n_ranks))
    if candidate.stages_per_rank != 2 or kind.forwards_ahead is None:
        return step
    if not kind.is_v:
        return max(step, every * _fill_of_loop(n_ranks, count, kind.forwards_ahead(n_ranks, 0)))
    relative = (exchanged[0] / whole, exchanged[1] / whole) if whole > 0 else (0.0, 0.0)
    return max(step, whole * least_on_v(kind.name, n_ranks, count, shares.halves, relative))


def least_shared_step(
    candidate: Candidate, whole: float, longest: float, shares: TimeFractions, exchanged: tuple[float, float] = (0.0, 0.0)
) -> float:
    """Seconds of a step whose stages are on so many ranks each as ``candidate.replicas`` says.

    The last stage, of k ranks that take x seconds for a microbatch, begins when the others have made the first, and what it has done last
    goes back through them; the other R - k ranks share the rest of the work. With p what of a microbatch's time comes in front and behind
    (all of it; only forwards where backwards are split),

        step >= p (W - x) + ceil(M / k) x        and        step >= M (W - x) / (R - k)

    of which the first grows with x and the second falls: the larger is least where they are equal. With c = M / (R - k), that is at

        x / W = (c - p) / (ceil(M / k) - p + c)        or at x = 0 where c < p: the first is at least p W

    Args:
        whole: seconds of all units, for one microbatch.
        longest: of the longest of them.
        exchanged: as ``least_step`` has it; what a split backward exchanges is not in front.
    """
    count, n_ranks, n_last = candidate.n_microbatches, sum(candidate.replicas), candidate.replicas[-1]  # M, R, k
    is_split = SCHEDULES[candidate.schedule].splits_backward
    with_exchanges = whole + sum(exchanged)
    around = shares.forward[0] if is_split else 1.0  # p
    rounds = -(-count // n_last)  # ceil(M / k)
    of_others = count / (n_ranks - n_last)  # c
    last_share = max(of_others - around, 0.0) / (rounds - around + of_others)  # x / W
    in_front = whole + exchanged[0] if is_split else with_exchanges
    until_last = in_front * (around * (1 - last_share) + rounds * last_share)
    average_rank = count * with_exchanges / n_ranks
    longest_unit = count * longest / max(candidate.replicas)  # on the stage that most ranks share
    one_microbatch = whole * shares.through + sum(exchanged) if is_split else with_exchanges
    return max(until_last, average_rank, longest_unit, one_microbatch)


@lru_cache(maxsize=1024)
def _fill_of_loop(n_ranks: int, count: int, forwards_ahead: int) -> float:
    """The same for two stages on each rank in a loop and whole backwards: rank r runs stages r and R+r, microbatches in groups of R.

    It is not done before what is above it in the first round, forward and backward, and all that it computes; nor before all of the first
    round and what is above it in the second, and what it computes but for the forwards of its first stage that come in front of the
    first one of its second, and as many backwards behind the last one.
    """
    ahead = min(forwards_ahead, count)
    best, weights = 0.0, np.full((len(_SECONDS), n_ranks), 1 / n_ranks)
    for _ in range(_ROUNDS):
        behind = 1 - np.cumsum(weights, axis=1)
        first = (1 - _SECONDS) * behind + _SECONDS * (1 - ahead * weights)
        each = count * weights + np.minimum(first, _SECONDS * behind)  # what a second counts on each rank
        best = max(best, float(each.min(axis=1).max()))
        weights = np.maximum(weights + (each.sum(axis=1, keepdims=True) / n_ranks - each) / count / 2, 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
    return best


_SECONDS = np.array([[0.3], [0.5], [0.7], [0.9]])
"""Weights of the second kind of path that are tried, all at once."""

_ROUNDS = 20
"""How often weights are mended."""
