"""ZBV: two stages a rank, down the ranks and up again; the first rank is also the last and starts its backwards without waiting.

ZB-V of Qi et al. 2023 (section 6), V-ZB of Qi et al. 2024. Stages r and 2R-1-r are on rank r: in half-size stages, every rank holds 2R
activations, as much as 1F1B's first rank.

    >>> from partitioner.schedules.clocks.unit_time import draw
    >>> print(draw(ZBV.build(2, 3)))
    rank 0 |0F0|0F1|0F2|3F0|3I0|3W0|3F1|3I1|3W1|0I0|0W0|3F2|3I2|3W2|0I1|0W1|0I2|0W2|
    rank 1 |...|1F0|2F0|1F1|2F1|2I0|2W0|1F2|1I0|1W0|2F2|2I1|2W1|1I1|2I2|1I2|1W1|2W2|1W2|

For F = I = W and m >= 2R-1 microbatches no rank is idle between its first and its last action: rank r starts r F late and ends r F late.
With a barrier between steps each rank is idle for (R-1) F. A step with fewer microbatches is one of 2R-1 without the missing ones.
"""

from __future__ import annotations

from partitioner.schedules.kind import ScheduleKind
from partitioner.schedules.pattern import Move, Rank, on, v_shaped


def zbv(rank: Rank) -> list[Move]:
    """Fill up to 2R activations, keep them at 2R, drain input gradients first."""
    down, up = rank.stages
    n_microbatches = max(rank.n_microbatches, 2 * rank.n_ranks - 1)
    n_filled = 2 * rank.n_ranks - 1 - rank.n_before
    fill = on(down, "F") * (2 * rank.n_after + 1)
    fill += (on(up, "F") + on(down, "F")) * rank.n_before
    fill += on(up, "FIW") * (rank.n_after + 1)
    steady = (on(down, "FIW") + on(up, "FIW")) * (n_microbatches - n_filled)
    steady += (on(down, "IW") + on(up, "FIW")) * rank.n_after
    drain = (on(down, "I") + on(up, "I")) * rank.n_before
    drain += on(down, "IW") * (rank.n_after + 1)
    drain += on(up, "W") * rank.n_before + on(down, "W") * rank.n_before
    return fill + steady + drain


ZBV = ScheduleKind(
    name="ZBV",
    source="Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241: ZB-V",
    pattern=zbv,
    placement=v_shaped,
    default_stages_per_rank=2,
    any_stages_per_rank=False,
    splits_backward=True,
    forwards_ahead=lambda n_ranks, rank: 2 * (n_ranks - 1 - rank) + 1,
    idle=0.15,
)
"""Two stages a rank on a V, every backward split."""
