"""Searches that end by counted work state a gap that holds for what they left out."""

from __future__ import annotations

import pytest

from partitioner.planner.search import best_first, plan_mesh
from passes.ir.plan import Plan
from tests.support.planning.fixed_options import MODES, plan_of

MODEL, CLUSTER = "convolutions", "h100:1x4"


def assert_gap_holds(limited: Plan, whole: Plan) -> None:
    assert limited.gap is not None
    assert whole.step_time >= limited.step_time * (1 - limited.gap) * (1 - 1e-6)


@pytest.mark.parametrize("mode", ["tensor", pytest.param("tile", marks=pytest.mark.slow)])
def test_axes_that_were_not_priced(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_mesh, "_MOST_OPERATIONS", 10**9)
    whole = plan_of(MODEL, MODES[mode], CLUSTER)
    monkeypatch.setattr(plan_mesh, "_MOST_OPERATIONS", 0)
    limited = plan_of(MODEL, MODES[mode], CLUSTER)
    assert " of " in limited.prediction.searched.partition("choices of axes")[0].partition("with")[2]
    assert_gap_holds(limited, whole)


@pytest.mark.parametrize("limit", [pytest.param("_MOST_UNITS", marks=pytest.mark.slow), "_MOST_RUNS"])
def test_meshes_that_were_not_opened(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan_of(MODEL, "auto", CLUSTER)
    monkeypatch.setattr(best_first, limit, 1)
    assert_gap_holds(plan_of(MODEL, "auto", CLUSTER), whole)
