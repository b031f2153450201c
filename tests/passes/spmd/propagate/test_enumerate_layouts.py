"""All choices of axes at once: what each call does under any of them is what the plain walk does under that one."""

from __future__ import annotations

import itertools
import random

import pytest

from partitioner.planner.sharding.axis_problem import axis_groups
from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.analysis.axis_names import batch_axes
from passes.analysis.layout_facts import LayoutFacts
from passes.analysis.merge_axes import merge_short_axes
from passes.normalize.randomness.functional_rng import split_randomness
from passes.spmd.propagate import enumerate_layouts
from passes.spmd.propagate.enumerate_layouts import LayoutChoices, layout_choices
from passes.spmd.propagate.layouts import Layouts
from passes.spmd.propagate.walk import assign_layouts
from tests.support.models.case import Case
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.slow_values import slow

QUICK = {(name, rows) for name in ("perceptron", "group_norm_convolution") for rows in (False, True)} | {("lstm", False)}

CASES = [
    pytest.param(case, rows, id=f"{case.name}-{rows}", marks=() if (case.name, rows) in QUICK else pytest.mark.slow)
    for case in ZOO
    for rows in (False, True)
]


def expect_equal(choices: LayoutChoices, choice: tuple[int, ...], plain: Layouts) -> None:
    every = range(len(choice))
    assert choices.calls.keys() == plain.needs.keys()
    for name, outcomes in choices.calls.items():
        found = outcomes.at(every, choice)
        assert found.needs == tuple(layout[0] for layout in plain.needs[name]), name
        if name != "output":
            assert found.cut == plain.cuts[name][0], name
            assert found.gives == tuple(layout[0] for layout in plain.results[name]), name
    for name, held in choices.held.items():
        assert held.at(every, choice).stored == plain.stored[name][0], name


@pytest.mark.parametrize(("case", "rows"), CASES)
def test_every_choice_is_that_of_the_plain_walk(case: Case, rows: bool) -> None:
    instance = case.build()
    graph = split_randomness(trace(instance.model, instance.args, dict(instance.kwargs), training=True))
    axes = find_axes(graph.graph)
    axes = merge_short_axes(graph, axes, 2)
    fixed = tuple(sorted(batch_axes(graph, axes))) if rows else ()
    if rows and not fixed:
        pytest.skip("the model has no batch, so no rows that a mesh dimension could cut")
    name = "data" if rows else "tensor"
    draw = random.Random(0)
    groups = [group.axes for group in axis_groups(graph, axes, 2, fixed)]
    groups = draw.sample(groups, min(len(groups), 8))
    choices = layout_choices(graph, axes, (name, 2), groups, fixed, rows=rows)
    for _ in range(6):
        choice = tuple(draw.randint(0, 1) for _ in groups)
        assigned = (*fixed, *(axis for group, chosen in zip(groups, choice, strict=True) if chosen for axis in group))
        expect_equal(choices, choice, assign_layouts(graph, axes, ((name, 2),), {name: assigned}, (name,) if rows else ()))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", ["group_norm_convolution", *slow("gpt", "unet", "mixture_of_experts", "swin", "resnet", "lstm")])
def test_enumerations_that_share_facts_find_the_same(name: str, rows: bool) -> None:
    """Whatever was asked for before: other axes that are always cut, the same ones in another order of priority, other dimensions."""
    instance = case_named(name).build()
    graph = split_randomness(trace(instance.model, instance.args, dict(instance.kwargs), training=True))
    axes = merge_short_axes(graph, find_axes(graph.graph), 2)
    batch = sorted(batch_axes(graph, axes)) if rows else []
    groups = [group.axes for group in axis_groups(graph, axes, 2, batch)]
    draw, facts = random.Random(0), LayoutFacts(graph, axes)
    for _ in range(6):
        fixed = [axis for group in draw.sample(groups, min(len(groups), draw.randint(0, 3))) for axis in group]
        rest = draw.sample([group for group in groups if group[0] not in fixed], max(len(groups) - 4, 1))[:6]
        for dimension in (("data", 2), ("data", 4)) if rows else (("tensor", 2), ("tensor", 4)):
            asked = (graph, axes, dimension, rest, [*batch, *fixed])
            assert layout_choices(*asked, rows=rows, facts=facts) == layout_choices(*asked, rows=rows)


@pytest.mark.parametrize("name", ["gpt", *slow("unet", "mixture_of_experts", "swin", "resnet")])
def test_groups_that_are_left_out_are_as_if_they_had_not_been_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that depends on too many choices drops some, also from the tables of the calls before it."""
    instance = case_named(name).build()
    graph = trace(instance.model, instance.args, dict(instance.kwargs), training=True)
    axes = merge_short_axes(graph, find_axes(graph.graph), 2)
    groups = [group.axes for group in axis_groups(graph, axes, 2, ())]
    monkeypatch.setattr(enumerate_layouts, "MOST", 4)
    found = layout_choices(graph, axes, ("tensor", 2), groups, narrowest=lambda numbers: sorted(numbers, reverse=True))
    assert 0 < len(found.groups) < len(groups)
    kept = layout_choices(graph, axes, ("tensor", 2), [groups[number] for number in found.groups])
    for of_kept, of_found in ((kept.calls, found.calls), (kept.held, found.held)):
        assert of_kept.keys() == of_found.keys()
        for node, outcomes in of_kept.items():
            scope = tuple(sorted({*outcomes.scope, *of_found[node].scope}))
            for choice in itertools.product((0, 1), repeat=len(scope)):
                assert outcomes.at(scope, choice) == of_found[node].at(scope, choice), node
