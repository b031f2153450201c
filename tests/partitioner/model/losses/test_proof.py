"""A loss that is proved to be a mean is exact in later steps, too, whatever the values and the state of the loss are then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError
from tests.support.processes import loss_cases as cases
from tests.support.processes.loss_cases import MEANS, NEITHER, ROWS, WEIGHT, WIDTH, difference, labelled
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


# -- terms without rows, and targets of the loss itself ----------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "data": {"devices": 2, "mode": "data"},
    "fsdp": {"devices": 2, "mode": "fsdp"},
    "pipeline": {"devices": 2, "mode": "pipeline", "n_microbatches": 2},
    "data_and_pipeline": {"devices": 4, "mode": {"data": 2, "pipeline": 2}, "n_microbatches": 2},
}


class Uncertain(nn.Module):
    """Returns classes, a parameter, and values that are computed from another: the last two have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = cases.model()
        self.log_variance = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.offsets = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layers(x), self.log_variance, self.offsets.sin()


class Scaled(nn.Module):
    """A loss with a factor and a term in buffers."""

    factor: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(0.7, dtype=torch.float64))
        self.register_buffer("weight", WEIGHT / 2)

    def forward(self, out: Any, t: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(out[0], t, weight=self.weight) * self.factor - self.factor
        return loss


SCALE = torch.tensor(0.4, dtype=torch.float64)

Loss = Callable[[Any, Tensor], Tensor]


def zeros(o: Tensor) -> Tensor:
    return torch.zeros(o.shape[0], dtype=torch.long)


def summed(out: Any, t: Tensor) -> Tensor:
    loss: Tensor | int = sum([F.cross_entropy(out[0], t), F.cross_entropy(out[0] + out[2], t) * out[1]])  # of 0 and the losses
    assert isinstance(loss, Tensor)
    return loss


EXACT: Mapping[str, Loss] = {
    "captured_factor": lambda out, t: F.cross_entropy(out[0], t) * SCALE,
    "factor_first": lambda out, t: -(SCALE * F.cross_entropy(out[0], t) / (1 + SCALE)),
    "buffers": Scaled(),
    "uncertainty": lambda out, t: F.cross_entropy(out[0], t) * torch.exp(-out[1]) + out[1],
    "two_uncertainties": lambda out, t: (
        F.cross_entropy(out[0], t) * torch.exp(-out[1])
        + 0.5 * F.nll_loss(out[0].mul(2).log_softmax(1), t) * out[2].exp().mean()
        + (out[1] + out[2].sum())
    ),
    "penalty": lambda out, t: F.cross_entropy(out[0], t, ignore_index=-100) + SCALE * out[2].pow(2).sum(),
    "row_means": lambda out, t: out[0].pow(2).mean() * torch.exp(-out[1]) + out[1] * out[2].mean(),
    "sum_of_a_list": summed,
    "cross_entropy_without_rows": lambda out, t: F.cross_entropy(out[0], t) + F.cross_entropy(out[2].unsqueeze(0), torch.tensor([2])),
    "weighted_rows": lambda out, t: (out[0].pow(2).mean(1) * (t.double() + 101)).sum() / (t.double() + 101).sum() * out[1].exp() + out[1],
    "zero_labels": lambda out, t: F.cross_entropy(out[0], zeros(out[0])),
    "zero_labels_nll": lambda out, t: F.nll_loss(out[0].log_softmax(1), t.new_zeros(out[0].shape[0])) * out[1],
    "zero_labels_weighted": lambda out, t: F.cross_entropy(out[0], zeros(out[0]), weight=WEIGHT),
    "mask_of_ones": lambda out, t: out[0].pow(2).mean(1).mul(torch.ones(t.shape[0])).sum() / torch.ones(t.shape[0]).sum().clamp(min=1),
    "zero_labels_and_row_mean": lambda out, t: F.cross_entropy(out[0], zeros(out[0])) + SCALE * out[0].pow(2).mean(),
    "pseudo_labels": lambda out, t: F.cross_entropy(out[0], out[0].detach().argmax(1)) + out[1],
    "positions": lambda out, t: F.cross_entropy(out[0], out[0].max(1).indices) + F.cross_entropy(out[0], out[0].topk(2).indices[:, 1]),
    "decided_labels": lambda out, t: F.cross_entropy(out[0], (out[0][:, 0] > 0).long(), label_smoothing=0.1),
}
"""Losses of the results of ``Uncertain`` that are exact by parts of the batch, however many targets each part ignores."""

PROPORTIONAL: Mapping[str, tuple[Loss, str]] = {
    "row_mean": (
        lambda out, t: F.cross_entropy(out[0], t) + SCALE * out[0].pow(2).mean(),
        "different numbers of targets: cross_entropy_loss over the targets that count, and mul over rows",
    ),
    "other_targets": (
        lambda out, t: F.cross_entropy(out[0], t) + SCALE * F.cross_entropy(out[0], t.clamp(min=0), ignore_index=1),
        "different numbers of targets: cross_entropy_loss and cross_entropy_loss_1 over the targets that count",
    ),
    "pseudo_labels": (
        lambda out, t: F.cross_entropy(out[0], t) * out[1] + F.cross_entropy(out[0], out[0].detach().argmax(1)),
        "different numbers of targets: cross_entropy_loss and cross_entropy_loss_1 over the targets that count",
    ),
}
"""Losses that are exact while all parts of the batch count as many targets a row, and the reason why others are refused."""

REFUSED: Mapping[str, tuple[Loss, str]] = {
    "term_beside_a_clamped_divisor": (
        lambda out, t: (out[0].pow(2).mean(1) * (t >= 0)).sum() / (t >= 0).sum().clamp(min=1) + out[1],
        "it adds a term to div, which does not divide by the weights of its targets alone",
    ),
    "weights_of_pseudo_labels": (
        lambda out, t: F.cross_entropy(out[0], out[0].argmax(1), weight=WEIGHT),
        "rows of the batch are mixed by operation aten.cross_entropy_loss.default",
    ),
    "ignored_pseudo_labels": (
        lambda out, t: F.cross_entropy(out[0], out[0].argmax(1), ignore_index=1),
        "rows of the batch are mixed by operation aten.cross_entropy_loss.default",
    ),
    "negative_pseudo_labels": (
        lambda out, t: F.cross_entropy(out[0], out[0].argmax(1).masked_fill(out[0][:, 0] > 0, -100)),
        "rows of the batch are mixed by operation aten.cross_entropy_loss.default",
    ),
    "product": (
        lambda out, t: F.cross_entropy(out[0], t) * F.cross_entropy(out[0], t),
        "rows of the batch are mixed by operation aten.mul.Tensor",
    ),
    "divided_by": (lambda out, t: out[1] / F.cross_entropy(out[0], t), "rows of the batch are mixed by operation aten.div.Tensor"),
    "number_of_rows": (
        lambda out, t: F.cross_entropy(out[0], t.clamp(min=0), reduction="sum") / len(t),
        r"it fixes the number of rows, as len\(target\) does; target.shape\[0\] does not",
    ),
}


@pytest.fixture(scope="module", params=["data", *slow("fsdp", "pipeline", "data_and_pipeline")])
def uncertain(request: pytest.FixtureRequest) -> PartitionedModel:
    return partition(Uncertain(), example_inputs=(labelled()[0],), **MODES[request.param])


def ignoring(*ignored: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and classes of which these are ignored."""
    x, target = labelled()
    target[list(ignored)] = -100
    return x, target


@pytest.mark.parametrize("name", EXACT)
def test_values_without_rows_are_factors_and_terms(uncertain: PartitionedModel, name: str) -> None:
    """Loss and gradients, those of the values without rows too, with unequally many targets in each part, and none in one."""
    for ignored in ((), (0, 1, 5), (0, 1, 2, 3, 6)):
        x, target = ignoring(*ignored)
        assert difference(Uncertain(), uncertain, EXACT[name], x, target) is None, ignored


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_terms_over_unlike_numbers_of_targets(uncertain: PartitionedModel, name: str) -> None:
    """They are exact if every second target is ignored, so that each part counts half of its rows."""
    loss_fn, message = PROPORTIONAL[name]
    if name != "other_targets":
        assert difference(Uncertain(), uncertain, loss_fn, *ignoring(*range(0, ROWS, 2))) is None
    x, target = ignoring(0, 1, 2)
    with pytest.raises(ConfigError, match=message):
        uncertain.train_step(x, target=target, loss_fn=loss_fn)
    assert difference(Uncertain(), uncertain, loss_fn, x, target, loss_reduction="batch") is None


@pytest.mark.parametrize("name", REFUSED)
def test_terms_that_are_not_proved_are_named(uncertain: PartitionedModel, name: str) -> None:
    loss_fn, message = REFUSED[name]
    x, target = ignoring(0, 1, 5)
    with pytest.raises(ConfigError, match=message):
        uncertain.train_step(x, target=target, loss_fn=loss_fn)
    assert difference(Uncertain(), uncertain, loss_fn, x, target, loss_reduction="batch") is None
