"""Lower bounds of a step over all stage cuts: closed forms in the times of the units.

With W the time of all units for one microbatch, M microbatches, R ranks, and L the load of the busiest rank:

    any schedule     M L                               the busiest rank computes all the time
                     W                                 a microbatch goes through all stages and back; without weight halves, if split
    GPipe            W + (M - 1) L                     the first microbatch arrives, and the last one goes on
    1F1B             2 W + (M - R - 1) L    M > R      path D of ``critical_paths`` through the slowest stage: the stages before it take no
                                                       longer than as many such stages
                     W / (1 - (1 - 1/M)^R)             path A, for the cuts for which it is equally long through all stages
    backward whole   W + (M - 1) b L'                  path C; b: least fraction of a unit's time that its backward takes, L': slowest stage
    ZB1P             f W / (1 - (1 - f/M)^R)           only forwards precede; f: least fraction that a forward takes
    in a loop        about (M + (R - 1) / 4) W / R     of two rounds: see ``_step_of_loop``
    on a V           about (M + f (R - 1) / 4) W / R   ranks start one after the other; more if M < 2 R: see ``v_schedules``

``L >= W / R``, but units are not divided: of 96 blocks and a head on 16 ranks, some rank has six blocks and the head, or seven blocks. And
ranks of different speeds share the work in proportion: stages on one device and on three, three times as fast, take 3/4 W of the faster.

Collectives inside stages are part of W, but how they are distributed over stages is not known: those of a split backward count as on the
stage where they count least.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from partitioner.planner.bounds.v_schedules import least_on_v
from partitioner.planner.costs.time_fractions import TimeFractions
from partitioner.planner.pipeline.candidates import Candidate
from partitioner.planner.solvers.stage_memory import Floats
from partitioner.schedules.catalog import find_schedule

_ALIKE = 1e-9
"""Relative differences up to which sums of units are the same."""

_MOST_SUMS = 600
"""Distinct sums of runs up to which those of several runs are distinguished."""


def shared_load(seconds: Floats, kinds: Sequence[int]) -> float:
    """Return a lower bound of the load of the busiest rank where ranks need different times for a unit.

    With T(k) the seconds of all units on kind k, a load of L on every rank r means ``sum over r of load(r) / T(k(r)) <= L sum of 1 / T``,
    and every unit u adds at least the least of its ``seconds(u, k) / T(k)`` to the left side.

    Args:
        seconds: (N, K) of each unit on each kind of rank.
        kinds: the kind of each rank.
    """
    present = sorted(set(kinds))
    totals = seconds[:, present].sum(axis=0)
    if not totals.all():
        return 0.0
    rates = sum(kinds.count(kind) / total for kind, total in zip(present, totals, strict=True))
    return float((seconds[:, present] / totals).min(axis=1).sum() / rates)


def least_load(seconds: Floats, n_parts: int, n_runs: int) -> float:
    """Return a lower bound of the load of the busiest part if units are not divided.

    Lengths that at least ``n_parts`` units have are common; c seconds of units have one. A part of T seconds has at most F(T) seconds of
    these, the largest sum of ``n_runs`` runs within T. The part with the longest other unit, x, has at most F(T - x). So the bound is the
    least T with ``(n_parts - 1) F(T) + F(T - x) >= c``.

    Args:
        seconds: (N,) of each unit.
        n_parts: number of ranks, or stages.
        n_runs: the most runs of units in each part.
    """
    longest = float(seconds.max(initial=0.0))
    evenly = max(float(seconds.sum()) / n_parts, longest)
    tick = longest * _ALIKE  # lengths are rounded to ticks, so that equal sums are equal
    if tick <= 0 or n_parts == 1:
        return evenly
    rounded = np.round(seconds / tick)
    _, place, counts = np.unique(rounded, return_inverse=True, return_counts=True)
    common = counts[place] >= n_parts
    most = 2 * evenly / tick
    from_first = np.unique(np.cumsum(rounded[common]))  # sums of some of the runs
    if np.count_nonzero(from_first <= most) > _MOST_SUMS:
        return evenly
    sums = _sums_of_runs(rounded[common], most)  # whatever other units are between
    if len(sums) > _MOST_SUMS:
        return evenly
    but_one = np.zeros(1)  # sums of all runs of a part but one
    for _ in range(n_runs - 1):
        but_one = np.unique(np.add.outer(but_one, sums))
        but_one = but_one[but_one <= most]
    longest_other, needed = float(rounded[~common].max(initial=0.0)), float(rounded[common].sum()) - 2 * len(seconds)

    def is_enough(length: float) -> bool:
        capacity = (n_parts - 1) * _largest_sum(but_one, sums, length) + _largest_sum(but_one, sums, length - longest_other)
        return capacity >= needed

    if is_enough(evenly / tick):
        return evenly
    lengths = range(math.ceil(evenly / tick), math.ceil(most))  # larger sums are not all known
    least = bisect_left(lengths, True, key=is_enough)
    return max(evenly, lengths[least] * tick * (1 - 1e3 * _ALIKE)) if least < len(lengths) else evenly


def _largest_sum(firsts: Floats, seconds: Floats, most: float) -> float:
    """Return the largest sum of one of the first and one of the second numbers, both sorted, within a length; -inf if there is none."""
    places = np.searchsorted(seconds, most + 0.5 - firsts, side="right") - 1
    return float(np.where(places >= 0, firsts + seconds[places], -np.inf).max())


def _sums_of_runs(lengths: Floats, most: float) -> Floats:
    """Return the distinct sums of runs of consecutive units up to a length, sorted; 0 among them."""
    ends = np.concatenate([[0.0], np.cumsum(lengths)])
    sums = np.subtract.outer(ends, ends)
    return np.unique(sums[(sums >= 0) & (sums <= most)])


def least_step(
    candidate: Candidate,
    n_ranks: int,
    whole: float,
    load: float,
    slowest: float,
    shares: TimeFractions,
    exchanged: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return a lower bound of the seconds of a step: the largest of the formulas in the file's table that hold for the schedule.

    Args:
        whole: W without collectives, seconds.
        load: L, seconds for one microbatch.
        slowest: seconds of the slowest stage for one microbatch.
        exchanged: seconds of the collectives of all stages together for one microbatch, forward and backward.
    """
    count, one_stage, forward = candidate.n_microbatches, candidate.stages_per_rank == 1, shares.forward[0]
    kind = find_schedule(candidate.schedule)
    total = whole + sum(exchanged)
    load = max(load, total / n_ranks)
    step = max(whole * shares.through + sum(exchanged) if kind.splits_backward else total, count * load)
    if not kind.splits_backward:
        if one_stage and kind.forwards_first:
            return max(step, total + (count - 1) * load)
        step = max(step, total + (count - 1) * shares.backward * slowest)
        if one_stage:
            step = max(step, total / (1 - (1 - 1 / count) ** n_ranks))
            return max(step, 2 * total + (count - n_ranks - 1) * load) if kind.alternates and count > n_ranks else step
    elif one_stage and forward > 0:
        left = 1 - forward / count
        counted = whole + exchanged[0] + exchanged[1] * left ** (n_ranks - 1)  # collectives of the backward as on the first rank
        return max(step, counted * forward / (1 - left**n_ranks))
    if candidate.stages_per_rank != 2 or kind.forwards_ahead is None:
        return step
    if not kind.is_v:
        return max(step, total * _step_of_loop(n_ranks, count, kind.forwards_ahead(n_ranks, 0)))
    relative = (exchanged[0] / whole, exchanged[1] / whole) if whole > 0 else (0.0, 0.0)
    return max(step, whole * least_on_v(kind.name, n_ranks, count, shares.halves, relative))


def least_shared_step(
    candidate: Candidate, whole: float, longest: float, shares: TimeFractions, exchanged: tuple[float, float] = (0.0, 0.0)
) -> float:
    """Return a lower bound of the seconds of a step with round-robin replicated stages (``candidate.replicas``).

    The last stage has k ranks and takes x seconds for a microbatch. It starts when the other stages have run the first microbatch's
    forward, and its last result goes back through them; the other R - k ranks share the rest of the work. With p the fraction of a
    microbatch's time that is before and after the last stage (1; that of forwards if backwards are split),

        step >= p (W - x) + ceil(M / k) x        and        step >= M (W - x) / (R - k)

    of which the first grows with x and the second falls: the larger is least where they are equal. With c = M / (R - k), that is at

        x / W = (c - p) / (ceil(M / k) - p + c)        or at x = 0 where c < p: the first is at least p W

    Args:
        whole: seconds of all units, for one microbatch.
        longest: seconds of the longest unit.
        exchanged: as in ``least_step``; collectives of a split backward are not before the last stage.
    """
    count, n_ranks, n_last = candidate.n_microbatches, sum(candidate.replicas), candidate.replicas[-1]  # M, R, k
    is_split = find_schedule(candidate.schedule).splits_backward
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


_SHARE_OF_SECOND = np.array([[0.3], [0.5], [0.7], [0.9]])
"""(T, 1) share of path 2 in each of T means, which are tried at once."""

_ROUNDS = 20
"""Number of adjustments of the weights of ranks."""


@lru_cache(maxsize=1024)
def _step_of_loop(n_ranks: int, count: int, forwards_ahead: int) -> float:
    """Return a lower bound of a step as a multiple of W, for two stages on each rank in a loop and whole backwards.

    Rank r runs stages r and R + r, microbatches in groups of R. Two paths (chains of actions, each of which waits for the one before it) go
    through each rank; those through rank 1 of two, in capitals, with two microbatches:

                   path 1                                     path 2
        rank 0     0F0 0f1 2f0 2f1 ... 2b0 2b1 0b0 0B1        0F0 0f1 2F0 2f1 ... 2b0 2B1 0b0 0B1
        rank 1     ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1        ... 1F0 1f1 3F0 3B0 3F1 3B1 1b0 1B1

    1. Forwards of the first microbatch in stages 0 to r - 1, all actions of rank r, backwards of the last microbatch in stages r - 1 to 0.
    2. Forwards of the first microbatch in stages 0 to R + r - 1, the actions of rank r from the first to the last one of stage R + r,
       backwards of the last microbatch in stages R + r - 1 to 0. Before these actions rank r runs ``ahead`` forwards of stage r, and after
       them at most as many backwards.

    A step is at least as long as any weighted mean of paths. With w_r the weight of rank r, and k the share of path 2, a second of a unit's
    time for one microbatch counts in the mean

        in stage r         M w_r  +  (1 - k) sum_{q > r} w_q  [path 1]  +  k (1 - ahead w_r)   [path 2]
        in stage R + r     M w_r                                        +  k sum_{q > r} w_q   [path 2]

    A unit may be in any stage, so each second of W counts at least as the least of these. Any weights give a bound; they are adjusted so
    that all ranks count about the same.
    """
    ahead = min(forwards_ahead, count)
    best, weights = 0.0, np.full((len(_SHARE_OF_SECOND), n_ranks), 1 / n_ranks)
    for _ in range(_ROUNDS):
        weight_behind = 1 - np.cumsum(weights, axis=1)
        counts_in_first_stage = (1 - _SHARE_OF_SECOND) * weight_behind + _SHARE_OF_SECOND * (1 - ahead * weights)
        counts_in_second_stage = _SHARE_OF_SECOND * weight_behind
        counts = count * weights + np.minimum(counts_in_first_stage, counts_in_second_stage)
        best = max(best, float(counts.min(axis=1).max()))
        # Work on a rank counts about ``count`` times its weight: half a step towards the mean of all ranks.
        weights = np.maximum(weights + (counts.sum(axis=1, keepdims=True) / n_ranks - counts) / count / 2, 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
    return best
