"""Why a plan: those that came next, the price of what was pinned, and what is proved."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from cost_models.hardware.units import format_seconds
from partitioner import Constraints, PartitionedModel, Plan, partition
from partitioner.planner.price_of_pins import Pinned, pinned
from partitioner.reports.explain.choices import front_section, pinned_section
from tests.support.models.attention.gpt import Gpt

TOKENS = torch.zeros(8, 6, dtype=torch.long)


def gpt(devices: int = 2, **arguments: Any) -> PartitionedModel:
    return partition(Gpt(depth=1), devices, example_inputs=(TOKENS,), cluster="a100-80gb:1x8", progress=False, **arguments)


PINS: dict[str, Any] = {"mode": "pipeline", "schedule": "GPipe", "n_microbatches": 2, "recompute": "full"}


@pytest.mark.slow
def test_the_price_of_a_pin_is_what_is_saved_without_it() -> None:
    """Each argument left out once, by hand."""
    pm = gpt(**PINS)
    problem = pm.traced.assumed.problem
    assert problem is not None
    found = {each.choice.partition("=")[0]: each for each in pinned(problem, pm.plan)}
    assert set(found) == set(PINS)
    for name, each in found.items():
        without = gpt(**{key: value for key, value in PINS.items() if key != name}).plan
        assert each.price == pytest.approx(max(0.0, pm.plan.step_time - without.step_time), rel=1e-6, abs=1e-12), name
    assert found["schedule"].price
    assert found["recompute"].price


@pytest.mark.slow
def test_every_entry_of_constraints_has_a_price() -> None:
    constraints = Constraints(axes={"heads": "tensor", "ffn": "tensor"}, split_spec={"blocks.0.up": "beginning"})
    pm = gpt(4, mode={"pipeline": 2, "tensor": 2}, constraints=constraints)
    text = pm.explain(prices=True)
    section = text.partition("\nPINNED\n")[2].partition("\n\n")[0]
    assert [line.split("  ")[1] for line in section.splitlines()[1:-1]] == [
        'mode={"pipeline": 2, "tensor": 2}',
        'split_spec={"blocks.0.up": "beginning"}',
        'axes={"heads": "tensor"}',
        'axes={"ffn": "tensor"}',
    ]


def test_prices_are_told_in_words() -> None:
    choices = [
        Pinned('schedule="GPipe"', 0.001, "data 4"),
        Pinned("n_microbatches=2", 0.0, "no faster plan was found"),
        Pinned('axes={"heads": "tensor"}', None, "no plan fits"),
    ]
    section = pinned_section(choices, gpt(2, mode="data").plan.predicted(step_time=0.004))
    assert section is not None
    assert section.lines()[1:-1] == [
        'schedule="GPipe"          1.00 ms of 4.00 ms  data 4',
        "n_microbatches=2                     nothing  no faster plan was found",
        'axes={"heads": "tensor"}   cannot do without  no plan fits',
    ]


def test_contenders_stand_in_order() -> None:
    plan = gpt().plan
    contenders = plan.prediction.contenders
    times = [each.step_time for each in contenders]
    assert times[0] == plan.step_time
    assert times == sorted(times)
    assert contenders[0].memory == max(plan.memory)
    assert len({each.words.partition(",")[0] for each in contenders}) == len(contenders)  # one of each mesh
    assert Plan.from_json(plan.to_json()).prediction == plan.prediction


def test_a_front_of_time_against_memory() -> None:
    plan = gpt(4).plan
    front = plan.prediction.front
    assert 1 <= len(front) <= 5
    times, peaks = [each.step_time for each in front], [each.memory for each in front]
    assert times == sorted(times)
    assert peaks == sorted(set(peaks), reverse=True)
    section = front_section(plan.predicted(front=(front[0], dataclasses.replace(front[0], step_time=2 * times[0], memory=1024))))
    assert section is not None
    assert [row[2:4] for row in section.rows[2:]] == [("100.0 % slower", "1.00 KiB")]
    assert front_section(gpt(2, mode="data").plan) is None


@pytest.mark.slow
def test_the_explanation_shows_plans_and_proofs() -> None:
    pm = gpt(4)
    text = pm.explain(prices=True)
    assert "PINNED" not in text
    rows = text.partition("\nPLANS\n")[2].partition("\n\n")[0].splitlines()
    plans = [row for row in rows[1:] if "chosen" in row or " % " in row]  # long cells go on in a line of their own
    assert "chosen" in plans[0]
    assert len(plans) == len(pm.plan.prediction.contenders)
    assert format_seconds(pm.plan.prediction.contenders[1].step_time) in plans[1]
    proof = "not proved: another could take up to" if pm.plan.gap else "it is proved that no other is faster"
    assert re.search(rf"  searched   \d+ plans? on \d+ of \d+ meshes were worked out; {proof}", text)
    assert re.search(r"  memory     .* of 68\.5 GiB on rank \d, the fullest", text)


@pytest.mark.slow
def test_the_gap_of_the_choice_of_axes_is_told() -> None:
    pm = gpt(2, mode="tensor")
    assert pm.plan.prediction.axes_gap == 0.0
    assert "of all choices of axes of parameters that were priced, the one that takes least" in pm.explain()
    assert gpt(2, mode="data").plan.prediction.axes_gap is None
    assert gpt(2, mode="pipeline").plan.prediction.axes_gap is None


@pytest.mark.slow
def test_a_plan_that_was_given_has_no_prices() -> None:
    plan = gpt(2, mode="data").plan
    assert "PINNED" not in gpt(2, plan=plan).explain(prices=True)
