"""Partitioned training equals the training of the unpartitioned model: every case, on 2, 3 and 4 devices, under every schedule.

The matrix, marked slow, meets every two of these: each case under each schedule and on each number of devices, each schedule on each
number of devices. ``tests.fuzz`` meets all three at random. What always runs is of a diagonal through it.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn

from partitioner import partition
from tests.support.models.case import Case, Instance
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.transparency import (
    N_MICROBATCHES,
    Steps,
    backward_steps,
    compare,
    compare_gradients,
    compare_values,
    first_difference,
    make_partitioned,
    partitioned_steps,
    reference_sizes,
    reference_steps,
)

DEVICES = (2, 3, 4)
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV", "DualPipeV")
FLOAT32_TOLERANCE = 1e-5
"""Sums over a batch in another order: a few tens of units in the seventh digit, relative to the largest element."""


QUICK = ("perceptron", "returns_loss", "shared_layer")
"""The cases of the diagonal that always run."""


def diagonal() -> dict[str, tuple[int, str]]:
    """Case -> devices and schedule, until every pair of these is met."""
    cases = enumerate(ZOO[: len(DEVICES) * len(SCHEDULES)])
    return {case.name: (DEVICES[row % 3], SCHEDULES[(row + row // 6) % 6]) for row, case in cases}


def matrix() -> list[ParameterSet]:
    """Return all of (case, schedule), on devices such that all pairs are met; slow but for the quick ones of the diagonal."""
    always = {name: pair for name, pair in diagonal().items() if name in QUICK}
    found = []
    for row, case in enumerate(ZOO):
        for column, schedule in enumerate(SCHEDULES):
            devices = DEVICES[(column - row // 6) % 3]
            marks = () if always.get(case.name) == (devices, schedule) else (pytest.mark.slow,)
            found.append(pytest.param(case, devices, schedule, marks=marks, id=f"{case.name}-{devices}-{schedule}"))
    return found


def cases(*always: str) -> pytest.MarkDecorator:
    """Return every case of the zoo; slow but for those named."""
    assert set(always) <= {case.name for case in ZOO}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=() if case.name in always else (pytest.mark.slow,), id=case.name) for case in ZOO]
    )


@pytest.mark.parametrize(("case", "devices", "schedule"), matrix())
def test_training(case: Case, devices: int, schedule: str) -> None:
    assert first_difference(case, devices=devices, mode="pipeline", schedule=schedule) is None


def test_the_matrix_meets_every_pair_and_the_diagonal() -> None:
    met = {str(each.id) for each in matrix()}
    assert met >= {f"{name}-{devices}-{schedule}" for name, (devices, schedule) in diagonal().items()}
    for case, devices in itertools.product(ZOO, DEVICES):
        assert any(each.startswith(f"{case.name}-{devices}-") for each in met)
    for devices, schedule in itertools.product(DEVICES, SCHEDULES):
        assert any(each.endswith(f"-{devices}-{schedule}") for each in met)


def test_the_diagonal_meets_every_schedule_on_every_number_of_devices() -> None:
    assert set(diagonal().values()) == {(devices, schedule) for devices in DEVICES for schedule in SCHEDULES}


@cases("batch_norm_convolution")
def test_forward_in_evaluation(case: Case) -> None:
    instance = case.build()
    instance.model.eval()
    pm = make_partitioned(instance, devices=3, mode="pipeline", n_microbatches=case.microbatches(N_MICROBATCHES))
    with torch.no_grad():
        reference = instance.model(*instance.args, **instance.kwargs)
        assert compare_values(reference, pm(*instance.args, **instance.kwargs), case.tolerance) is None


@cases()
def test_backward_as_any_module(case: Case) -> None:
    reference = reference_steps(case, microbatch_sizes=reference_sizes(case))
    other = backward_steps(case, devices=3, mode="pipeline", n_microbatches=case.microbatches(N_MICROBATCHES))
    assert compare(reference, other, case.tolerance) is None


@cases("shared_layer")
def test_model_parallel(case: Case) -> None:
    assert first_difference(case, n_microbatches=1, devices=3, mode="model") is None


UNEVEN = {9: "nine_in_four", 2: "two_in_four", 1: "one_in_four"}
"""Rows of a batch, cut into four microbatches."""


@pytest.mark.parametrize(
    ("case", "batch_size"),
    [
        pytest.param(
            case,
            rows,
            marks=() if (case.name, rows) == ("batch_norm_convolution", 1) else (pytest.mark.slow,),
            id=f"{case.name}-{words}",
        )
        for place, case in enumerate(ZOO)
        for number, (rows, words) in enumerate(UNEVEN.items())
        if number == place % 3 or case.name == "batch_norm_convolution"
    ],
)
def test_uneven_batch(case: Case, batch_size: int) -> None:
    assert first_difference(case, batch_size=batch_size, devices=3, mode="pipeline", schedule="1F1B") is None


@cases()
def test_one_partition_serves_every_batch_size(case: Case) -> None:
    pm = make_partitioned(case.build(), devices=3, mode="pipeline", n_microbatches=case.microbatches(N_MICROBATCHES))
    for batch_size in (1, 2, 5, 9, 16):
        sizes = reference_sizes(case, batch_size)
        reference = reference_steps(case, n_steps=1, batch_size=batch_size, microbatch_sizes=sizes)
        instance = case.build(batch_size=batch_size)
        pm.zero_grad()
        loss = pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)
        difference = compare_values(reference.losses[0], loss.detach(), case.tolerance)
        difference = difference or compare_gradients(reference.gradients[0], pm.full_gradients(), case.tolerance)
        assert difference is None, f"batch of {batch_size}: {difference}"


@cases()
def test_float32(case: Case) -> None:
    """One step, and not the weights after it: AdamW blows up what rounding leaves of a gradient that is zero, such as a key's bias's."""
    reference = reference_steps(case, n_steps=1, microbatch_sizes=reference_sizes(case), dtype=torch.float32)
    other = partitioned_steps(
        case,
        n_steps=1,
        dtype=torch.float32,
        devices=4,
        mode="pipeline",
        schedule="ZB1P",
        n_microbatches=case.microbatches(N_MICROBATCHES),
    )
    assert compare(dataclasses.replace(reference, state={}), dataclasses.replace(other, state={}), FLOAT32_TOLERANCE) is None


@pytest.mark.slow
def test_gradients_accumulate_until_they_are_cleared() -> None:
    case = case_named("shared_layer")
    instance = case.build()
    pm = make_partitioned(instance, devices=2, mode="pipeline", n_microbatches=N_MICROBATCHES)
    once = reference_steps(case, n_steps=1).gradients[0]
    twice = {name: None if gradient is None else 2 * gradient for name, gradient in once.items()}
    for expected in (once, twice):
        pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
        assert compare_gradients(expected, pm.full_gradients(), case.tolerance) is None
    pm.zero_grad()
    assert all(gradient is None for gradient in pm.full_gradients().values())


@pytest.mark.slow
def test_a_loss_that_sums() -> None:
    case = case_named("residual")
    instance = case.build()

    def squared_error(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target, reduction="sum")

    pm = make_partitioned(instance, devices=3, mode="pipeline", n_microbatches=3)
    loss = pm.train_step(*instance.args, target=instance.target, loss_fn=squared_error, loss_reduction="sum")
    expected = squared_error(instance.model(*instance.args), instance.target)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in instance.model.named_parameters()}
    assert compare_values(expected.detach(), loss.detach(), case.tolerance) is None
    assert compare_gradients(gradients, pm.full_gradients(), case.tolerance) is None


def test_blocks_that_differ_in_the_sign_of_a_zero_are_told_apart() -> None:
    """0.0 and -0.0 are equal numbers, with reciprocals that are not."""

    class Block(nn.Module):
        def __init__(self, zero: float) -> None:
            super().__init__()
            self.linear, self.norm, self.zero = nn.Linear(8, 8), nn.LayerNorm(8), zero

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(torch.relu(self.linear(x)))
            result: Tensor = x + torch.sigmoid(torch.full_like(y, self.zero).reciprocal()) * y
            return result

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(zero) for zero in (0.0, 0.0, 0.0, -0.0, -0.0, -0.0))).double()
    x, target = torch.randn(2, 4, 8, dtype=torch.float64)
    pm = partition(model, devices=2, mode="pipeline", example_inputs=(x,))
    loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    expected = nn.functional.mse_loss(model(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_dropout_draws_the_mask_of_the_model_in_one_piece() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Dropout(0.3))]
    model = nn.Sequential(*layers).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    pm = make_partitioned(Instance(model, (x,), {}, None), devices=3, mode="model")
    torch.manual_seed(7)
    expected = model(x)
    torch.manual_seed(7)
    assert compare_values(expected.detach(), pm(x).detach(), 1e-12) is None


@pytest.mark.parametrize(
    ("gradient", "apart", "alike"), [(1e-18, 5e-12, True), (1e-18, 1e-9, False), (1e-2, 5e-12, False)], ids=["rounding", "more", "not zero"]
)
def test_what_rounding_moves_is_no_difference(gradient: float, apart: float, *, alike: bool) -> None:
    """AdamW moves a weight by what is left of a gradient that is zero; beside one whose gradient is not, nothing is allowed for it."""

    def steps(sign: int) -> Steps:
        bias, weight = torch.full((2,), sign * gradient, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        if gradient > 1e-9:
            bias = bias.abs()
        state = {"bias": torch.full((2,), sign * apart / 2, dtype=torch.float64), "weight": weight}
        return Steps((torch.ones(()),) * 3, ({"bias": bias, "weight": weight},) * 3, state)

    assert (compare(steps(1), steps(-1), 1e-9) is None) == alike
