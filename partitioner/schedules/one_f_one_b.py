"""1F1B: a rank runs ahead only as far as the ranks after it need, then each forward is followed by a backward.

PipeDream-Flush (Narayanan et al. 2021). Its bubble is GPipe's, its memory does not grow with the microbatches.

    >>> from partitioner.schedules.clocks.unit_time import draw
    >>> print(draw(ONE_F_ONE_B.build(3, 4)))
    rank 0 |0F0|0F1|0F2|...............|0B0    |0F3|0B1    |...|0B2    |...|0B3    |
    rank 1 |...|1F0|1F1|.......|1B0    |1F2|1B1    |1F3|1B2    |...|1B3    |
    rank 2 |.......|2F0|2B0    |2F1|2B1    |2F2|2B2    |2F3|2B3    |

With m microbatches on R ranks, the stage of rank r holds min(m, R-r) activations, and the ranks are idle for (R-1)/(m+R-1) of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from partitioner.schedules.kind import InFlight, ScheduleKind
from partitioner.schedules.pattern import Move, Rank, looped, on


def one_f_one_b(rank: Rank) -> list[Move]:
    """Run as many forwards as ranks come after, then one forward, one backward alternately, then the backwards that are left."""
    (stage,) = rank.stages
    return alternate([on(stage, "F")] * rank.n_microbatches, [on(stage, "B")] * rank.n_microbatches, n_ahead=rank.n_after)


def alternate(forwards: Sequence[list[Move]], backwards: Sequence[list[Move]], n_ahead: int) -> list[Move]:
    """Return ``n_ahead`` forwards, then one forward and one backward alternately, then the backwards that are left.

    >>> [kind.value for _, kind in alternate([on(0, "F")] * 3, [on(0, "B")] * 3, n_ahead=1)]
    ['F', 'F', 'B', 'F', 'B', 'B']
    """
    pairs = zip_longest(forwards[n_ahead:], backwards, fillvalue=())
    return list(chain(*forwards[:n_ahead], *(chain(forward, backward) for forward, backward in pairs)))


def _in_flight(n_ranks: int, n_microbatches: int) -> InFlight:
    in_flight = tuple(min(n_microbatches, n_ranks - rank) for rank in range(n_ranks))
    return InFlight(ahead=in_flight, saved=in_flight, weights_behind=(0,) * n_ranks)


ONE_F_ONE_B = ScheduleKind(
    name="1F1B",
    source="Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv:2104.04473",
    pattern=one_f_one_b,
    placement=looped,
    default_stages_per_rank=1,
    any_stages_per_rank=False,
    splits_backward=False,
    alternates=True,
    in_flight_alone=_in_flight,
    idle=0.05,
)
"""One stage a rank, whole backwards."""
