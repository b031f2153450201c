"""Cases that ``torch.distributed.pipelining`` (2.13) refuses or computes wrongly, and that are right here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.models.case import BATCH_SIZE, Case
from tests.support.models.zoo import case_named
from tests.support.running.transparency import (
    compare,
    first_difference,
    make_partitioned,
    microbatch_sizes,
    partitioned_steps,
    reference_steps,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "shared_layer"])
def test_a_weight_tied_across_stages_gets_the_sum_of_its_gradients(name: str) -> None:
    """There each stage trains its own copy with its own part of the gradient, and nothing says so."""
    case = case_named(name)
    assert first_difference(case, devices=4, mode="pipeline", schedule="1F1B") is None


@pytest.mark.slow
def test_a_weight_tied_across_stages_stays_one_weight() -> None:
    case = case_named("gpt")
    instance = case.build()
    pm = make_partitioned(instance, devices=4, mode="pipeline", n_microbatches=4)
    assert sum(stage.parameter_count for stage in pm.plan.stages) > sum(p.numel() for p in instance.model.parameters())
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
        optimizer.step()
    state = pm.full_state_dict()
    assert torch.equal(state["head.weight"], state["token.weight"])
    copies = [parameter for parameter in pm.parameters() if parameter.shape == state["token.weight"].shape]
    assert all(torch.equal(copy, state["token.weight"]) for copy in copies)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branches", "encoder_decoder"])
def test_a_value_used_by_several_later_stages_gets_the_sum_of_their_gradients(name: str) -> None:
    """There the backward fails."""
    assert first_difference(case_named(name), devices=4, mode="pipeline", schedule="1F1B") is None


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param("unet", "Interleaved1F1B", marks=pytest.mark.slow),
        pytest.param("unet", "ZBV", marks=pytest.mark.slow),
        pytest.param("unet", "DualPipeV", marks=pytest.mark.slow),
        pytest.param("branches", "Interleaved1F1B", marks=pytest.mark.slow),
        pytest.param("branches", "ZBV", marks=pytest.mark.slow),
        ("branches", "DualPipeV"),
    ],
)
def test_schedules_with_several_stages_a_device_take_skips(name: str, schedule: str) -> None:
    """There such schedules refuse a value that does not go to the next stage."""
    assert first_difference(case_named(name), devices=2, mode="pipeline", schedule=schedule) is None


@pytest.mark.slow
@pytest.mark.parametrize("n_microbatches", [4, 7])
def test_a_batch_that_the_microbatches_do_not_divide(n_microbatches: int) -> None:
    """There a batch of 9 in 4 microbatches dies inside gloo."""
    case = case_named("unet")
    assert first_difference(case, batch_size=9, n_microbatches=n_microbatches, devices=3, mode="pipeline", schedule="1F1B") is None


@pytest.mark.slow
@pytest.mark.parametrize("case", [case_named("batch_norm_convolution"), case_named("resnet")], ids=lambda case: case.name)
def test_batch_normalisation_under_microbatching_is_reported_and_defined(case: Case) -> None:
    """There the gradients change without a warning. Here is one; the numbers are those of the microbatches trained in sequence."""
    pm = make_partitioned(case.build(), devices=2, mode="pipeline", n_microbatches=4)
    (note,) = [note for note in pm.plan.notes if "batch normalisation" in note]
    assert note in " ".join(str(pm).split())
    first = next(name for name, module in case.build().model.named_modules() if isinstance(module, nn.BatchNorm2d))
    assert first in note
    assert "microbatch" in note
    assert "gradients differ" in note
    reference = reference_steps(case, microbatch_sizes=microbatch_sizes(BATCH_SIZE, 4))
    assert compare(reference, partitioned_steps(case, devices=2, mode="pipeline", n_microbatches=4), case.tolerance) is None


@pytest.mark.slow
def test_batch_normalisation_in_one_microbatch_has_nothing_to_report() -> None:
    case = case_named("batch_norm_convolution")
    pm = make_partitioned(case.build(), devices=2, mode="pipeline", n_microbatches=1)
    assert not any("normalisation" in note for note in pm.plan.notes)
    assert compare(reference_steps(case), partitioned_steps(case, devices=2, mode="pipeline", n_microbatches=1), case.tolerance) is None
