"""How far ahead the stages of a schedule run: the facts about the order of actions that step-time bounds and memory need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from partitioner.schedules.catalog import find_schedule, make_schedule
from partitioner.schedules.kind import Awaiting, InFlight, in_flight_while_awaiting, peak_in_flight
from passes.ir.schedule import ActionKind


@dataclass(frozen=True)
class Order:
    """Facts about the order in which the stages of a schedule compute.

    Attributes:
        n_microbatches: of a step.
        stage_ranks: for each stage, the ranks that run it.
        splits: whether backwards are done in two halves.
        fills: whether all forwards come before all backwards.
        ahead: for each stage, the most forwards that a rank begins before the backward (the input half, if split) of the first of them has
            ended.
        in_flight: for each stage, the most microbatches whose activations a rank holds at once. Equals ``ahead`` if backwards are whole.
        later: the same after the stage's first whole backward or weight half, when gradients are in memory too.
        awaiting: the same while a message is received.
    """

    n_microbatches: int
    stage_ranks: tuple[tuple[int, ...], ...]
    splits: bool
    fills: bool
    ahead: tuple[int, ...]
    in_flight: tuple[int, ...]
    later: tuple[int, ...]
    awaiting: Awaiting


@lru_cache(maxsize=256)
def order_of(name: str, n_ranks: int, n_microbatches: int, stages_per_rank: int, replicas: tuple[int, ...] = ()) -> Order:
    """Return the order of a schedule by name; raises as ``make_schedule`` does.

    >>> order_of("1F1B", 4, 8, 1).in_flight, order_of("ZB1P", 4, 8, 1).in_flight
    ((4, 3, 2, 1), (4, 4, 4, 4))
    """
    kind = find_schedule(name)
    splits, fills = kind.splits_backward, kind.forwards_first
    if kind.in_flight_alone is not None and stages_per_rank == 1 and not replicas:
        alone = kind.in_flight_alone(n_ranks, n_microbatches)
        later = tuple(min(saved, n_microbatches - 1) for saved in alone.saved)
        stage_ranks = kind.stage_ranks(n_ranks, stages_per_rank)
        received = _awaiting_of_single_stages(alone, n_microbatches)
        return Order(n_microbatches, stage_ranks, splits, fills, alone.ahead, alone.saved, later, received)
    schedule = make_schedule(name, n_ranks, n_microbatches, stages_per_rank, replicas)
    ahead = peak_in_flight(schedule, (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT))
    in_flight, later = peak_in_flight(schedule), peak_in_flight(schedule, later=True)
    return Order(n_microbatches, schedule.stage_ranks, splits, fills, ahead, in_flight, later, in_flight_while_awaiting(schedule))


def _awaiting_of_single_stages(alone: InFlight, n_microbatches: int) -> Awaiting:
    """Return ``in_flight_while_awaiting`` of a schedule with one stage a rank, in closed form: without building the schedule.

    F F ... F | B F B F ... | B B ... B    a rank's microbatches in flight grow, stay, and shrink

    forward           the last forward is awaited while all others are in flight
    later_forward     a forward is awaited during a backward only if two microbatches more than the peak exist
    backward          the first backward is awaited at the peak
    later_backward    as many where forwards and backwards alternate; else ``_in_flight_while_draining``
    """
    return Awaiting(
        forward=tuple(min(saved, n_microbatches - 1) for saved in alone.saved),
        later_forward=tuple(saved if n_microbatches > saved + 1 else 0 for saved in alone.saved),
        backward=alone.saved,
        later_backward=tuple(
            _in_flight_while_draining(saved, behind, n_microbatches)
            for saved, behind in zip(alone.saved, alone.weights_behind, strict=True)
        ),
    )


def _in_flight_while_draining(peak: int, weights_behind: int, n_microbatches: int) -> int:
    """Return the most microbatches in flight when a backward is awaited and some backward has ended; 0: none is awaited then.

    Args:
        peak: the most microbatches in flight at any time.
        weights_behind: input halves before the first weight half, which is the first to free activations.
    """
    if peak < n_microbatches:
        return peak
    return n_microbatches - 1 if n_microbatches - weights_behind > 2 else 0
