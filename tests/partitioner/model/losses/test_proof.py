"""A loss that is proved to be a mean is exact in later steps, too, whatever the values and the state of the loss are then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import PartitionedModel
from passes.ir.errors import ConfigError
from tests.support.processes import loss_cases as cases
from tests.support.processes.loss_cases import MEANS, NEITHER, difference, labelled
from tests.support.running.slow_values import slow


def test_ignored_targets_count_by_what_is_left(pm: PartitionedModel) -> None:
    """Whichever are ignored: none at first, then unequally many, all of one microbatch, all of them (no number, as unpartitioned)."""
    x, target = labelled()
    for ignored in ((), (0,), (0, 1, 2), (5, 6, 7), tuple(range(8))):
        labels = target.clone()
        labels[list(ignored)] = -100
        assert difference(cases.model(), pm, F.cross_entropy, x, labels) is None, ignored


@pytest.mark.parametrize("pm", ["pipeline", *slow("data", "mesh")], indirect=True)
def test_two_means_over_unlike_numbers_of_targets(pm: PartitionedModel) -> None:
    """Exact by rows while nothing is ignored; by all rows at once, and said so, or refused, from then on."""
    x, target = labelled()

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o, t) + 0.1 * o.pow(2).mean()

    assert difference(cases.model(), pm, loss_fn, x, target) is None
    target[:3] = -100
    with pytest.raises(ConfigError, match="different numbers of targets"):
        pm.train_step(x, target=target, loss_fn=loss_fn)
    assert difference(cases.model(), pm, loss_fn, x, target, loss_reduction="batch") is None


def test_what_is_equal_today_may_differ_tomorrow(pm: PartitionedModel) -> None:
    """Scales that are equal on the first step prove nothing: the loss is refused, and exact if it is said to take all rows."""
    x, _ = labelled()
    equal, unlike = torch.ones(8, dtype=torch.float64), torch.arange(1.0, 9, dtype=torch.float64)

    def scaled(o: Tensor, t: Tensor) -> Tensor:
        return o.pow(2).mean() / t.amax()

    with pytest.raises(ConfigError, match=r"not proved to be a mean over the rows .*amax"):
        pm.train_step(x, target=equal, loss_fn=scaled)
    for target in (equal, unlike):
        assert difference(cases.model(), pm, scaled, x, target, loss_reduction="batch") is None


@pytest.mark.parametrize("pm", ["pipeline", *slow("data", "mesh")], indirect=True)
def test_weights_of_classes_are_those_of_the_step(pm: PartitionedModel) -> None:
    """A new tensor, another one in the module, and other values in it: each step weighs by the weights that its loss reads."""
    x, target = labelled()
    criterion = nn.CrossEntropyLoss(weight=cases.WEIGHT.clone())

    def made(weight: Tensor) -> Callable[..., Tensor]:
        return lambda o, t: F.cross_entropy(o, t, weight=weight)

    for step in range(1, 4):
        assert difference(cases.model(), pm, made(cases.WEIGHT**step), x, target) is None
        assert difference(cases.model(), pm, criterion, x, target) is None
        assert criterion.weight is not None
        criterion.weight.pow_(2)
        assert difference(cases.model(), pm, criterion, x, target) is None
        criterion.weight = cases.WEIGHT.flip(0) + step


@pytest.mark.parametrize("pm", ["data", *slow("pipeline", "mesh")], indirect=True)
def test_a_part_of_the_batch_without_weight(pm: PartitionedModel) -> None:
    """It is 0 / 0 in the part, and no number to weigh the part by, which may have a sum: the step takes the loss of all rows."""
    x, target = labelled()
    target[:4], target[4:] = 0, 5
    assert difference(cases.model(), pm, MEANS["masked_or_none"], x, target) is None
    with pytest.warns(UserWarning, match="a part of the batch has no weight"):
        assert difference(cases.model(), pm, MEANS["masked"], x, target) is None
    weight = torch.tensor([0.0, 1, 1, 1, 1, 2], dtype=torch.float64)
    assert difference(cases.model(), pm, lambda o, t: F.cross_entropy(o, t, weight=weight), x, target) is None


def test_rows_that_are_all_equal_hide_nothing(pm: PartitionedModel) -> None:
    x, target = (each[:1].expand(8, *each.shape[1:]).contiguous() for each in labelled())
    with pytest.raises(ConfigError, match="not proved to be a mean"):
        pm.train_step(x, target=target, loss_fn=NEITHER["largest"])


@pytest.mark.parametrize("pm", ["data", *slow("pipeline", "mesh")], indirect=True)
def test_a_loss_that_draws_random_numbers(pm: PartitionedModel) -> None:
    """Ranks would draw the same numbers for different rows. Of all rows at once, the numbers are those of one device."""
    x, target = labelled()

    def noisy(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o * torch.rand_like(o), t)

    with pytest.raises(ConfigError, match=r"not proved to be a mean .*: it draws random numbers"):
        pm.train_step(x, target=target, loss_fn=noisy)
    output = cases.model()(x)
    torch.manual_seed(5)
    expected = noisy(output, target)
    after = torch.rand(2)
    torch.manual_seed(5)
    torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=noisy, loss_reduction="batch"), expected.detach())
    assert torch.equal(torch.rand(2), after)


def test_a_batch_of_one_row_and_microbatches_of_one(pipeline: PartitionedModel) -> None:
    x, target = labelled()
    assert difference(cases.model(), pipeline, NEITHER["root_mean_square"], x[:1], target[:1]) is None  # nothing is cut
    with pytest.raises(ConfigError, match="not proved to be a mean"):
        pipeline.train_step(x[:3], target=target[:3], loss_fn=NEITHER["root_mean_square"])


def test_a_loss_that_values_decide(pipeline: PartitionedModel) -> None:
    x, target = labelled()

    def decided(o: Tensor, t: Tensor) -> Tensor:
        return o.mean() if float(o.detach().sum()) < 1e9 else o.max()

    with pytest.raises(ConfigError, match="values of a tensor decide"):
        pipeline.train_step(x, target=target, loss_fn=decided)
    assert difference(cases.model(), pipeline, decided, x, target, loss_reduction="batch") is None
