"""The zoo holds what it says, and the harness that compares finds what it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.support.models.case import Case
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.slow_values import all_but
from tests.support.running.transparency import compare, compare_gradients, compare_values, loss_of, microbatch_sizes, reference_steps

PER_CASE = pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
"""Every case of the zoo."""

SOME_CASES = pytest.mark.parametrize("case", all_but(ZOO[::3], ZOO), ids=lambda case: case.name)
"""Every third is quick."""


def test_names_are_unique() -> None:
    assert len({case.name for case in ZOO}) == len(ZOO) >= 29


@SOME_CASES
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


@SOME_CASES
def test_microbatching_changes_training_exactly_where_the_case_says_so(case: Case) -> None:
    """The harness finds a difference where there is one, and none where there is none."""
    difference = compare(reference_steps(case), reference_steps(case, microbatch_sizes=microbatch_sizes(8, 4)), case.tolerance)
    assert (difference is not None) == (case.batch_norm or case.uneven_loss or case.compares_rows), difference


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


def test_what_rounding_leaves_of_a_vanishing_gradient_is_no_difference() -> None:
    """The bias of a key adds the same to all scores of a query, which the softmax over them ignores."""
    gradients = reference_steps(case_named("vit"), n_steps=1).gradients[0]
    name = next(name for name in gradients if name.endswith((".key.bias", ".k_proj.bias")))
    largest, key = largest_gradient(gradients), gradients[name]
    assert key is not None
    assert key.abs().max() < 1e-16 * largest
    assert compare_gradients(gradients, {**gradients, name: -2 * key}, 1e-9) is None


def test_a_difference_in_any_gradient_is_found() -> None:
    """However small the gradient is: two parts in 1e9 of the largest of all, and of its own largest where that is more."""
    gradients = reference_steps(case_named("vit"), n_steps=1).gradients[0]
    largest = largest_gradient(gradients)
    for name, gradient in gradients.items():
        assert gradient is not None
        for error in (2e-9 * largest, 2e-9 * gradient.abs().max().item() + 1e-13 * largest):
            changed = gradient.clone()
            changed.view(-1)[-1] += error
            difference = compare_gradients(gradients, {**gradients, name: changed}, 1e-9)
            assert difference is not None
            assert difference.place == f"gradient of {name}"


def test_float32_allows_rounding_of_its_own_precision() -> None:
    gradients = {"weight": torch.ones(2), "bias": torch.full((2,), 1e-5)}
    assert compare_gradients(gradients, {**gradients, "bias": gradients["bias"] + 1e-7}, 1e-5) is None
    assert compare_gradients(gradients, {**gradients, "bias": gradients["bias"] + 2e-6}, 1e-5) is not None
    wide = {name: gradient.double() for name, gradient in gradients.items()}
    assert compare_gradients(wide, {**wide, "bias": wide["bias"] + 1e-7}, 1e-5) is not None


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


def largest_gradient(gradients: Mapping[str, Tensor | None]) -> float:
    return max(gradient.abs().max().item() for gradient in gradients.values() if gradient is not None)
