"""The zoo holds what it says, and the harness that compares finds what it should."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.models.case import Case
from tests.models.zoo import ZOO, case_named
from tests.transparency import compare, compare_values, loss_of, microbatch_sizes, reference_steps

PER_CASE = pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
"""Every case of the zoo."""


def test_names_are_unique() -> None:
    assert len({case.name for case in ZOO}) == len(ZOO) >= 16


@PER_CASE
def test_equal_seeds_give_equal_instances(case: Case) -> None:
    first, second = case.build(seed=3), case.build(seed=3)
    torch.testing.assert_close(dict(first.model.state_dict()), dict(second.model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close((first.args, first.kwargs, first.target), (second.args, second.kwargs, second.target), rtol=0, atol=0)


@PER_CASE
def test_is_small_float64_and_trains(case: Case) -> None:
    instance = case.build()
    parameters = list(instance.model.parameters())
    assert all(parameter.dtype is torch.float64 for parameter in parameters)
    assert 100 <= sum(parameter.numel() for parameter in parameters) <= 10_000
    output = instance.model(*instance.args, **instance.kwargs)
    loss = loss_of(case, output, instance.target)
    assert loss.shape == ()
    loss.backward()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients)


@PER_CASE
def test_microbatching_changes_training_exactly_where_the_case_says_so(case: Case) -> None:
    """The harness finds a difference where there is one, and none where there is none."""
    difference = compare(reference_steps(case), reference_steps(case, microbatch_sizes=microbatch_sizes(8, 4)), case.tolerance)
    assert (difference is not None) == (case.batch_norm or case.uneven_loss), difference


def test_the_first_difference_is_named() -> None:
    reference = reference_steps(case_named("perceptron"))
    gradients = [dict(step) for step in reference.gradients]
    gradient = gradients[1]["2.weight"]
    assert gradient is not None
    gradients[1]["2.weight"] = gradient + torch.eye(12, dtype=gradient.dtype) * 1e-6
    difference = compare(reference, dataclasses.replace(reference, gradients=tuple(gradients)), 1e-9)
    assert difference is not None
    assert difference.place == "step 2, gradient of 2.weight"
    assert difference.error == pytest.approx(1e-6)


def test_an_absent_gradient_is_not_a_gradient_of_zeros() -> None:
    reference = reference_steps(case_named("nested_outputs"))
    assert reference.gradients[0]["unused.weight"] is None
    zeros = {name: torch.zeros(()) if value is None else value for name, value in reference.gradients[0].items()}
    difference = compare(reference, dataclasses.replace(reference, gradients=(zeros, *reference.gradients[1:])), 1e-9)
    assert str(difference) == "step 1, gradient of trunk.1.weight: a gradient instead of no gradient"


def test_a_wrong_structure_is_a_difference() -> None:
    one = torch.ones(2)
    assert compare_values({"a": one, "b": (one, 3)}, {"a": one.clone(), "b": (one, 3)}, 1e-9) is None
    assert compare_values({"a": one, "b": (one, 3)}, {"a": one, "b": [one, 3]}, 1e-9) is not None
    assert compare_values({"a": one, "b": (one, 3)}, {"a": one, "b": (one, 4)}, 1e-9) is not None
    assert compare_values((one,), (one.double(),), 1e-9) is not None
    assert compare_values((one,), (one * float("nan"),), 1e-9) is not None
