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
        stage_ranks, comes = kind.stage_ranks(n_ranks, stages_per_rank), _awaiting_of_single_stages(alone, n_microbatches)
        return Order(n_microbatches, stage_ranks, splits, fills, alone.ahead, alone.held, later, comes)
    schedule = make_schedule(name, n_ranks, n_microbatches, stages_per_rank, replicas)
    ahead = peak_in_flight(schedule, (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT))
    in_flight, later = peak_in_flight(schedule), peak_in_flight(schedule, later=True)
    return Order(n_microbatches, schedule.stage_ranks, splits, fills, ahead, in_flight, later, awaiting(schedule))


def _awaiting_of_single_stages(alone: InFlight, n_microbatches: int) -> Awaiting:
    """``partitioner.schedules.kind.awaiting`` where each rank runs one stage, in closed form: the schedule need not be written.

    F F ... F | B F B F ... | B B ... B    what a rank holds grows, stays, and shrinks

    forward           the message of the last forward comes while all the others are held
    later_forward     a forward is awaited while a backward runs, from two microbatches more than are held on
    backward          the message of the first backward comes when all are held
    later_backward    as many where forwards and backwards alternate; without, ``_held_while_shrinking``
    """
    return Awaiting(
        forward=tuple(min(held, n_microbatches - 1) for held in alone.held),
        later_forward=tuple(held if n_microbatches > held + 1 else 0 for held in alone.held),
        backward=alone.held,
        later_backward=tuple(
            _held_while_shrinking(held, behind, n_microbatches) for held, behind in zip(alone.held, alone.weights_behind, strict=True)
        ),
    )


def _held_while_shrinking(held: int, weights_behind: int, n_microbatches: int) -> int:
    """Microbatches in flight when a backward is awaited and some backward has ended; 0: none is awaited then.

    Args:
        held: microbatches in flight at most.
        weights_behind: input halves in front of the first weight half: only behind that is anything given up.
    """
    if held < n_microbatches:
        return held
    return n_microbatches - 1 if n_microbatches - weights_behind > 2 else 0
