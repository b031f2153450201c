"""ZB1P: 1F1B with the backward in two halves; input gradients run first, weight gradients fill the bubble at the end.

ZB-H1 of Qi et al. 2023. W on rank r stays r microbatches later than I, so that every rank holds as much as the first one.

    >>> from partitioner.schedules.clocks.unit_time import draw
    >>> print(draw(ZERO_BUBBLE.build(3, 4)))
    rank 0 |0F0|0F1|0F2|.......|0I0|0W0|0F3|0I1|0W1|0I2|0W2|0I3|0W3|
    rank 1 |...|1F0|1F1|...|1I0|1F2|1I1|1W0|1F3|1I2|1W1|1I3|1W2|1W3|
    rank 2 |.......|2F0|2I0|2F1|2I1|2F2|2I2|2W0|2F3|2I3|2W1|2W2|2W3|

With m microbatches on R ranks, every stage holds min(m, R) activations until their W: the peak of 1F1B's first rank. For m >= R and W no
longer than F and I, each rank is idle for (R-1)(F+I-W), a third of 1F1B's (R-1)(F+I+W) when the three are equal.
"""

from __future__ import annotations

from partitioner.schedules.kind import InFlight, ScheduleKind
from partitioner.schedules.one_f_one_b import alternate
from partitioner.schedules.pattern import Move, Rank, looped, on


def zero_bubble(rank: Rank) -> list[Move]:
    """Run forwards and input gradients as 1F1B; the weight gradients stay as many microbatches late as ranks come before."""
    (stage,) = rank.stages
    n_behind = min(rank.n_before, rank.n_microbatches)
    forwards = [on(stage, "F")] * rank.n_microbatches
    backwards = [on(stage, "I")] * n_behind + [on(stage, "IW")] * (rank.n_microbatches - n_behind)
    return alternate(forwards, backwards, n_ahead=rank.n_after) + on(stage, "W") * n_behind


def _in_flight(n_ranks: int, n_microbatches: int) -> InFlight:
    ahead = tuple(min(n_microbatches, n_ranks - rank) for rank in range(n_ranks))
    return InFlight(ahead, saved=(min(n_microbatches, n_ranks),) * n_ranks, weights_behind=tuple(range(n_ranks)))


ZERO_BUBBLE = ScheduleKind(
    name="ZB1P",
    source="Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241: ZB-H1",
    pattern=zero_bubble,
    placement=looped,
    default_stages_per_rank=1,
    any_stages_per_rank=False,
    splits_backward=True,
    in_flight_alone=_in_flight,
    idle=0.3,
)
"""One stage a rank, every backward split."""
