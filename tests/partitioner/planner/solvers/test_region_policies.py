"""The choice of recomputation by region, beside all choices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from partitioner.planner.solvers.region_policies import RegionCosts, cheapest_policies


def memory(regions: Sequence[RegionCosts], choice: Sequence[int], counts: Sequence[int]) -> float:
    """Return the formula of the module's text, term by term."""
    saved = [region.saved[policy] for region, policy in zip(regions, choice, strict=True)]
    moments = []
    for place, (region, policy) in enumerate(zip(regions, choice, strict=True)):
        made = sum(later.gradients for later in regions[place + 1 :])
        moments.append(sum(saved[: place + 1]) + region.working[policy] + made)
    return sum((count - 1) * size for count, size in zip(counts, saved, strict=True)) + max(moments)


def some_regions(draw: random.Random) -> list[RegionCosts]:
    """Draw whole numbers, so that ties are common; some regions are equal, and some have one policy only."""
    kinds = []
    for _ in range(draw.randint(1, 3)):
        n_policies = draw.choice((1, 2, 2, 3))
        time, saved, working = (tuple(float(draw.randint(0, 9)) for _ in range(n_policies)) for _ in range(3))
        kinds.append(RegionCosts(time, saved, working, float(draw.randint(0, 3))))
    return [draw.choice(kinds) for _ in range(draw.randint(1, 6))]


@pytest.mark.parametrize("seed", range(150))
def test_no_other_choice_that_fits_takes_less_time(seed: int) -> None:
    draw = random.Random(seed)
    regions, limits = some_regions(draw), list[tuple[list[int], float]]()
    for _ in range(draw.randint(1, 2)):
        counts = [draw.randint(1, 3)] * len(regions) if seed % 2 else [draw.randint(1, 3) for _ in regions]
        limits.append((counts, float(draw.randint(5, 60))))
    choices = list(itertools.product(*(range(len(region.time)) for region in regions)))
    fitting = [choice for choice in choices if all(memory(regions, choice, counts) <= limit for counts, limit in limits)]

    def time(choice: Sequence[int]) -> float:
        return sum(region.time[policy] for region, policy in zip(regions, choice, strict=True))

    found = cheapest_policies(regions, limits)
    if found is None:
        assert not fitting
    else:
        assert found.choice in fitting
        assert time(found.choice) == min(map(time, fitting))
        assert found.spare == min(limit - memory(regions, found.choice, counts) for counts, limit in limits)


@pytest.mark.slow
def test_a_long_chain_of_equal_blocks_is_quick() -> None:
    block = RegionCosts((1.0, 1.3), (40.0, 4.0), (20.0, 56.0), 5.0)
    found = cheapest_policies([block] * 200, [([4] * 200, 20_000.0), ([3] * 200, 21_000.0)])
    assert found is not None
    assert 0 < sum(found.choice) < 200
