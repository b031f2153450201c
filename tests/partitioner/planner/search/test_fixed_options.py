"""No plan with an option fixed by hand beats the plan that is made without it by more than the gap that the latter states."""

from __future__ import annotations

import itertools

import pytest

from partitioner import Constraints
from passes.ir.errors import ConfigError, InfeasiblePlanError
from tests.support.models.realistic import REALISTIC
from tests.support.planning.fixed_options import CLUSTERS, MODES, beaten_by, plan_of

QUICK = {
    ("narrowing perceptron", "pipeline", "h100:1x4"),
    ("narrowing perceptron", "pipeline x tensor", "h100:1x4"),
    ("convolutions", "tensor", "h100:1x4"),
    ("wide perceptron", "data x tensor", "cpu:1x4"),
    ("tables", "tensor", "cpu:1x4"),
}
"""A few of all: of each, some option was once better than the default by more than it stated."""

LONG = {
    ("narrowing perceptron", "pipeline", "h100:1x4"),
    ("narrowing perceptron", "pipeline x tensor", "h100:1x4"),
    ("convolutions", "tensor", "h100:1x4"),
    ("tables", "tensor", "cpu:1x4"),
}
"""Of those the ones that run with the full matrices alone."""

EVERY = [
    pytest.param(*each, marks=() if each in QUICK - LONG else pytest.mark.slow, id=" - ".join(each))
    for (row, name), (column, mode), (place, cluster) in itertools.product(*map(enumerate, (REALISTIC, MODES, CLUSTERS)))
    if (each := (name, mode, cluster)) in QUICK or (row + column + place) % 2 == 0
]
"""Every model in every mode, on each of the two clusters."""


@pytest.mark.timeout(600)  # up to thirty plans of a language model
@pytest.mark.parametrize(("name", "mode", "cluster"), EVERY)
def test_no_option_fixed_by_hand_beats_the_plan(name: str, mode: str, cluster: str) -> None:
    """Axes each by itself and together, microbatches, schedules, stages on each device, recomputation."""
    try:
        _, beaten = beaten_by(name, MODES[mode], cluster)
    except (ConfigError, InfeasiblePlanError) as refusal:
        if (name, mode, cluster) in QUICK:
            raise
        pytest.skip(refusal.problem)
    assert not beaten, "\n".join(map(str, beaten))


def test_one_microbatch_is_among_those_of_a_pipeline() -> None:
    """Layers that take less than the start of their kernels are slower in four microbatches than in one, on the same mesh."""
    default, one = (plan_of("narrowing perceptron", "pipeline", "h100:1x4", n_microbatches=count) for count in (None, 1))
    assert default.step_time <= one.step_time
    assert default.gap == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["cpu:1x4", "h100:1x4"])
def test_fewer_named_axes_are_no_slower_than_more(cluster: str) -> None:
    """Axes that are not named are planned, and the gap is that to all plans with more named axes."""
    sets = [(), ("heads",), ("heads", "ffn"), ("heads", "ffn", "vocab"), ("heads", "ffn", "vocab", "sequence"), ("sequence",)]
    plans = {names: plan_of("GPT-2", "tensor", cluster, constraints=Constraints(axes=dict.fromkeys(names, "tensor"))) for names in sets}
    for fewer, more in itertools.permutations(sets, 2):
        if set(fewer) < set(more):
            gap = plans[fewer].gap
            assert gap is not None
            assert plans[fewer].step_time * (1 - gap) <= plans[more].step_time * (1 + 1e-9), (fewer, more)
    assert plans["heads",].step_time <= plans["heads", "ffn", "vocab"].step_time * (1 + 1e-9)


@pytest.mark.slow
def test_a_mode_that_is_kept_states_what_other_axes_would_take() -> None:
    """``"sequence"`` cuts the sequence alone; with the vocabulary cut over the same ranks a step takes less, which is said."""
    kept = plan_of("GPT-2", "sequence", "cpu:1x4")
    other = plan_of("GPT-2", "sequence", "cpu:1x4", constraints=Constraints(axes={"vocab": "sequence"}))
    assert kept.axes == (("sequence", "sequence"),)
    assert kept.gap is not None
    assert kept.step_time * (1 - kept.gap) <= other.step_time * (1 + 1e-9) < kept.step_time
    assert kept.prediction.axes_gap is not None
    assert 0 < kept.prediction.axes_gap <= kept.gap
    assert "vocab" in kept.prediction.searched
    assert "other axes than the mode means take less time" in kept.prediction.searched


@pytest.mark.slow
def test_tiles_state_what_other_axes_would_take() -> None:
    """``"tile"`` cuts space; with channels over the same ranks a step of this model takes less, which the gap covers; or rows alone."""
    kept = plan_of("U-Net", "tile", "cpu:1x4")
    other = plan_of("U-Net", "tile", "cpu:1x4", constraints=Constraints(axes={"channels": "tile"}))
    assert kept.gap is not None
    assert kept.step_time * (1 - kept.gap) <= other.step_time * (1 + 1e-9) < kept.step_time
    assert "another could take" in kept.prediction.searched
    rows = plan_of("AlexNet", "tile", "cpu:1x4", constraints=Constraints(axes={"height": "tile"}))
    assert plan_of("AlexNet", "tile", "cpu:1x4").step_time <= rows.step_time


@pytest.mark.slow
def test_a_search_whose_cuts_all_fail_on_messages_ends() -> None:
    """Three stages on each of four devices: bounds of single paths let through millions of prefixes that messages rule out later."""
    plan = plan_of("nn.Transformer", "auto", "h100:1x4", stages_per_rank=3)
    assert plan.gap is not None
