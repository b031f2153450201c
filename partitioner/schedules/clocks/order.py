"""How far ahead the stages of a schedule run: what bounds of a step need to know of the order of its actions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from partitioner.schedules.catalog import find_schedule, make_schedule
from partitioner.schedules.kind import Awaiting, InFlight, awaiting, peak_in_flight
from passes.ir.schedule import ActionKind

__all__ = ["Order", "order_of"]


@dataclass(frozen=True)
class Order:
    """What is known of the order in which the stages of a schedule compute.

    Attributes:
        n_microbatches: of a step.
        stage_ranks: for each stage, the ranks that run it.
        splits: whether backwards are done in two halves.
        fills: whether all forwards come in front of all backwards.
        ahead: for each stage, how many forwards a rank begins at most before the backward of the first of them, or its input half, has
            ended.
        in_flight: the same for the weight half: microbatches whose activations a rank holds at once. Equal where backwards are whole.
        later: as many while it computes behind its first whole backward, or weight half.
        awaiting: as many while a message comes to it.
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
    """The order of a schedule by name; raises as ``make_schedule`` does.

    >>> order_of("1F1B", 4, 8, 1).in_flight, order_of("ZB1P", 4, 8, 1).in_flight
    ((4, 3, 2, 1), (4, 4, 4, 4))
    """
    kind = find_schedule(name)
    splits, fills = kind.splits_backward, kind.forwards_first
    if kind.in_flight_alone is not None and stages_per_rank == 1 and not replicas:
        alone = kind.in_flight_alone(n_ranks, n_microbatches)
        later = tuple(min(held, n_microbatches - 1) for held in alone.held)
        stage_ranks, comes = kind.stage_ranks(n_ranks, stages_per_rank), _awaiting_alone(alone, n_microbatches, fills)
        return Order(n_microbatches, stage_ranks, splits, fills, alone.ahead, alone.held, later, comes)
    schedule = make_schedule(name, n_ranks, n_microbatches, stages_per_rank, replicas)
    ahead = peak_in_flight(schedule, (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT))
    in_flight, later = peak_in_flight(schedule), peak_in_flight(schedule, later=True)
    return Order(n_microbatches, schedule.stage_ranks, splits, fills, ahead, in_flight, later, awaiting(schedule))


def _awaiting_alone(alone: InFlight, n_microbatches: int, fills: bool) -> Awaiting:
    """Of one stage on each rank: in a steady state, which some microbatches more than ranks are enough for, any of its messages.

    F F ... F | B F | B F ... | B B ... B    what a rank holds grows, stays, where there are more microbatches than that, and shrinks

    Where input halves are in front of the first weight half, what a rank holds shrinks from the third message behind them on.
    """
    in_flight = alone.held
    if n_microbatches > len(in_flight) + 1 and not fills:
        return Awaiting(in_flight, in_flight, in_flight, in_flight)
    growing = tuple(min(held, n_microbatches - 1) for held in in_flight)
    staying = tuple(held if n_microbatches > held + 1 else 0 for held in in_flight)
    shrinking = tuple(
        held if held < n_microbatches else n_microbatches - 1 if n_microbatches > behind + 2 else 0
        for held, behind in zip(in_flight, alone.weights_behind, strict=True)
    )
    return Awaiting(growing, staying, in_flight, shrinking)
