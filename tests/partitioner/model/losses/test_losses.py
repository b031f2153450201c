"""A loss is what it is said to be, or is refused: microbatches and ranks never change its number unsaid.

The reference is the original model on the whole batch, in float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import PartitionedModel, partition
from partitioner.schedules.catalog import SCHEDULES, make_schedule
from partitioner.schedules.clocks.unit_time import simulate
from partitioner.schedules.forwards_first import forwards_first
from passes.ir.errors import ConfigError, PartitionWarning
from passes.ir.schedule import ActionKind
from tests.partitioner.model.losses.conftest import MODES, partitioned
from tests.support.processes import loss_cases as cases
from tests.support.processes.loss_cases import MEANS, NEITHER, WIDTH, difference, labelled
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import all_but, slow


@pytest.mark.parametrize("pm", ["data", *slow("pipeline", "mesh")], indirect=True)
def test_losses_of_all_rows_are_exact(pm: PartitionedModel) -> None:
    x, target = labelled()
    for name, loss_fn in {**MEANS, **NEITHER}.items():
        assert difference(cases.model(), pm, loss_fn, x, target, loss_reduction="batch") is None, name


def test_rows_of_ranks_and_microbatches_are_in_their_order() -> None:
    x, target = labelled()
    pm = partitioned(**MODES["mesh"])
    for name in ("row_order", "root_mean_square"):
        assert difference(cases.model(), pm, NEITHER[name], x, target, loss_reduction="batch") is None, name
    assert difference(cases.model(), pm, MEANS["ignored_labels"], x, target) is None


@pytest.mark.parametrize("pm", ["data", *slow("pipeline", "mesh")], indirect=True)
def test_means_are_exact_without_saying_more(pm: PartitionedModel) -> None:
    x, target = labelled()
    for name, loss_fn in MEANS.items():
        assert difference(cases.model(), pm, loss_fn, x, target) is None, name


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_no_mean_is_refused(pm: PartitionedModel, name: str) -> None:
    x, target = labelled()
    with pytest.raises(ConfigError, match="loss_fn is not proved to be a mean over the rows") as raised:
        pm.train_step(x, target=target, loss_fn=NEITHER[name])
    assert 'loss_reduction="batch"' in str(raised.value)
    assert all(parameter.grad is None for parameter in pm.parameters())


@pytest.mark.parametrize(("rows", "is_exact"), [(1, False), (2, True), (4, False)])
def test_parts_may_not_take_another_branch_of_a_loss(rows: int, is_exact: bool) -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o, t) * (1 if o.shape[0] in (1, 4) else 2)

    x, target = labelled()
    pm = partitioned(devices=1, mode="pipeline", n_microbatches=len(x) // rows)
    if is_exact:
        assert difference(cases.model(), pm, loss, x, target) is None
    else:
        with pytest.raises(ConfigError, match=f"depends on the number of rows, and {rows} rows take another branch"):
            pm.train_step(x, target=target, loss_fn=loss)


@pytest.mark.parametrize("pm", ["pipeline", *slow("data", "mesh")], indirect=True)
def test_sums_are_told_from_means(pm: PartitionedModel) -> None:
    x, target = labelled()

    def total(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o, t, reduction="sum")

    with pytest.raises(ConfigError, match='pass loss_reduction="sum"'):
        pm.train_step(x, target=target, loss_fn=total)
    with pytest.raises(ConfigError, match="leave loss_reduction out"):
        pm.train_step(x, target=target, loss_fn=F.cross_entropy, loss_reduction="sum")
    with pytest.raises(ConfigError, match="not proved to be a sum"):
        pm.train_step(x, target=target, loss_fn=lambda o, t: total(o, t) + 1, loss_reduction="sum")
    assert difference(cases.model(), pm, total, x, target, loss_reduction="sum") is None


@pytest.mark.parametrize("schedule", all_but(["1F1B"], SCHEDULES))
def test_every_schedule_takes_a_loss_of_all_rows(schedule: str) -> None:
    x, target = labelled()
    pm = partitioned(devices=2, mode="pipeline", n_microbatches=3, schedule=schedule)
    assert difference(cases.model(), pm, NEITHER["root_mean_square"], x, target, loss_reduction="batch") is None


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(1, 2), (2, 1)], ids=str)
def test_ranks_that_share_a_stage(stages: tuple[int, ...]) -> None:
    x, target = labelled()
    pm = partitioned(devices=3, mode={"pipeline": stages}, n_microbatches=4)
    assert difference(cases.model(), pm, NEITHER["contrastive"], x, target, loss_reduction="batch") is None
    assert difference(cases.model(), pm, MEANS["ignored_labels"], x, target) is None


def test_forwards_first_runs_wherever_the_schedule_does() -> None:
    """The clock runs it, for which no rank may wait for ever; and all forwards of the last stage precede its backwards."""
    for name in SCHEDULES:
        for ranks in (1, 2, 4):
            for microbatches in (1, 3, 8):
                schedule = forwards_first(make_schedule(name, ranks, microbatches))
                simulate(schedule)
                for actions in schedule.actions:
                    kinds = [action.kind is ActionKind.FORWARD for action in actions]
                    assert kinds == sorted(kinds, reverse=True)
                assert sorted(map(str, schedule)) == sorted(map(str, make_schedule(name, ranks, microbatches)))


# -- what is no loss ---------------------------------------------------------------------------------------------------------------

_OWN = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
_OF_ALL_ROWS = torch.arange(8.0, dtype=torch.float64).unsqueeze(1)

WRONG: dict[str, tuple[Any, str]] = {
    "a_name": ("ce", "loss_fn is 'ce', which cannot be called"),
    "nothing": (None, "no loss: the model returns more than one number"),
    "an_integer": (lambda o, t: 3, "returns a value of type int"),
    "a_float": (lambda o, t: 3.0, "returns a value of type float"),
    "no_value": (lambda o, t: None, "returns a value of type NoneType"),
    "a_tuple": (lambda o, t: (o.mean(), t), "returns a value of type tuple"),
    "a_value_per_row": (lambda o, t: o.mean(1), "returns a tensor of shape"),
    "no_gradient": (lambda o, t: o.detach().mean(), "does not require a gradient"),
    "other_arguments": (lambda o: o.mean(), "takes 1 positional argument but 2 were given"),
    "a_parameter": (lambda o, t: (o * _OWN).pow(2).mean(), "gradients for tensors that are no outputs of the model"),
    "weights_of_all_rows": (lambda o, t: (o * _OF_ALL_ROWS).mean(), 'if it takes all 8 rows, pass loss_reduction="batch"'),
    "labels_out_of_place": (lambda o, t: F.cross_entropy(o, t.float()), "loss_fn fails on outputs of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_loss_is_refused(pipeline: PartitionedModel, name: str) -> None:
    x, target = labelled()
    loss_fn, message = WRONG[name]
    with pytest.raises(ConfigError) as raised:
        pipeline.train_step(x, target=target, loss_fn=loss_fn)
    assert message in str(raised.value)
    assert raised.value.remedy
    assert all(parameter.grad is None for parameter in pipeline.parameters())


def test_targets_that_do_not_fit(pipeline: PartitionedModel) -> None:
    x, target = labelled()
    with pytest.raises(ConfigError, match="target has shape"):
        pipeline.train_step(x, target=target[:5], loss_fn=F.cross_entropy)
    with pytest.raises(ConfigError, match="requires a gradient"):
        pipeline.train_step(x, target=x.clone().requires_grad_(), loss_fn=F.mse_loss)
    with pytest.raises(ConfigError, match="there is no loss_reduction 'none'"):
        pipeline.train_step(x, target=target, loss_fn=F.cross_entropy, loss_reduction="none")  # type: ignore[arg-type]


def test_a_loss_without_a_target(pipeline: PartitionedModel) -> None:
    x, _ = labelled()
    assert difference(cases.model(), pipeline, NEITHER["contrastive"], x, None, loss_reduction="batch") is None


# -- losses of the model -----------------------------------------------------------------------------------------------------------


class Returning(nn.Module):
    """Returns a loss of its own."""

    def __init__(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = cases.model()
        self.loss_fn = loss_fn

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": self.loss_fn(logits, target), "logits": logits}


@pytest.mark.parametrize("name", ["weighted", *slow("root_mean_square", "masked", "masked_or_none")])
def test_a_model_that_returns_its_loss(name: str) -> None:
    x, target = labelled()
    model = Returning({**MEANS, **NEITHER}[name])
    pm = partition(model, devices=2, mode="data", example_inputs=(x, target))
    expected = model(x, target)["loss"]
    expected.backward()
    torch.testing.assert_close(pm.train_step(x, target), expected.detach())
    gradients = pm.full_gradients()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[parameter_name], parameter.grad)


class Learned(nn.Module):
    """Returns a loss with a parameter of its own, the parameter, and a mean over rows that may be a term of the loss."""

    def __init__(self, loss_fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.loss_fn = cases.model(), loss_fn
        self.s = nn.Parameter(torch.linspace(0.1, 0.6, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": self.loss_fn(logits, target, self.s), "s": self.s.exp(), "size": logits.pow(2).mean()}


LEARNED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "uncertainty": lambda o, t, s: F.cross_entropy(o, t) * torch.exp(-s[0]) + s[0],
    "penalty": lambda o, t, s: F.cross_entropy(o, t) + s.exp().sum(),
    "scaled_row_mean": lambda o, t, s: F.cross_entropy(o, t) / s[1] - s[0] * o.pow(2).mean(),
    "shared": lambda o, t, s: (s[1] * F.cross_entropy(o, t) + s[1]) * s[2] + s[1] * (o.pow(2).mean() + s[2]),
    "without_rows": lambda o, t, s: F.cross_entropy(o, t) + F.cross_entropy(s.unsqueeze(0), torch.tensor([2])),
    "sum_of_a_list": lambda o, t, s: torch.as_tensor(sum([F.cross_entropy(o, t), s[0] * F.nll_loss(o, t)])),
}


@pytest.mark.parametrize("mode", ["pipeline", *slow("data", "fsdp", "tensor", {"data": 2, "pipeline": 2})])
def test_a_returned_loss_with_values_without_rows(mode: Any) -> None:
    """Parts of the batch ignore unequally many targets; a step of the loss alone, and a call that returns everything."""
    x, target = labelled()
    target[[0, 1, 2, 5]] = -100
    for name, loss_fn in LEARNED.items():
        options = {"n_microbatches": 2} if "pipeline" in mode else {}
        pm = partition(Learned(loss_fn), 4 if isinstance(mode, dict) else 2, mode, example_inputs=(x, target), **options)  # type: ignore[arg-type]
        model = Learned(loss_fn)
        expected = model(x, target)
        expected["loss"].backward()
        for step in (lambda pm=pm: pm.train_step(x, target), lambda pm=pm: returned_and_differentiated(pm, x, target)):
            pm.zero_grad()
            torch.testing.assert_close(step(), expected["loss"].detach(), rtol=1e-10, atol=1e-12)
            gradients = pm.full_gradients()
            for parameter_name, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[parameter_name], parameter.grad, rtol=1e-9, atol=1e-12, msg=f"{name} {parameter_name}")
        found = pm(x, target)
        for result in ("s", "size"):
            torch.testing.assert_close(found[result], expected[result], rtol=1e-10, atol=1e-12)


def returned_and_differentiated(pm: PartitionedModel, x: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = pm(x, target)["loss"]
    loss.backward()
    return loss.detach()


def subtracts(out: Tensor, target: Tensor) -> Tensor:
    out -= target
    return out.pow(2).mean()


def scales_a_column(out: Tensor, target: Tensor) -> Tensor:
    out[:, 0].mul_(2.0)
    return (out - target).pow(2).mean()


@pytest.mark.parametrize("reduction", ["mean", "batch"])
@pytest.mark.parametrize("mode", ["pipeline", "data", "tensor"])
@pytest.mark.parametrize("loss_fn", [subtracts, scales_a_column])
def test_a_loss_may_change_results_in_place(loss_fn: Callable[..., Tensor], mode: str, reduction: Any) -> None:
    """As it may those of the model, which are no leaves of autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, target = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    pm = partition(model, devices=2, mode=mode, n_microbatches=2, example_inputs=(x,))
    loss = pm.train_step(x, target=target, loss_fn=loss_fn, loss_reduction=reduction)
    expected = loss_fn(model(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.full_gradients()[name], parameter.grad)


class Pair(nn.Module):
    """Returns a pair that ``returns`` makes of the input and of a layer's result."""

    def __init__(self, returns: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.returns = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double(), returns

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.returns(x, self.linear(x))


def clamps_the_first(out: tuple[Tensor, Tensor], _: object) -> Tensor:
    return out[0].clamp_(min=-0.1).mean() + out[1].pow(2).mean()


SHARED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a view": lambda _, y: (y, y.unsqueeze(1)),
    "the same": lambda _, y: (y, y),
    "an input": lambda x, y: (x.unsqueeze(1), y),
}


@pytest.mark.parametrize("mode", ["pipeline", "data"])
@pytest.mark.parametrize("name", SHARED)
def test_results_that_share_memory_are_not_changed(name: str, mode: str) -> None:
    """In eager PyTorch the loss would change both, and copies are apart."""
    x = torch.randn(4, 6, dtype=torch.float64)
    pm = partition(Pair(SHARED[name]), devices=2, mode=mode, example_inputs=(x,))
    with pytest.raises(ConfigError, match="whose memory another result, an input or a parameter has"):
        pm.train_step(x, loss_fn=clamps_the_first)


@pytest.mark.parametrize("mode", ["pipeline", "data"])
def test_of_several_results_with_memory_of_their_own_one_may_be_changed(mode: str) -> None:
    x, model = torch.randn(4, 6, dtype=torch.float64), Pair(lambda _, y: (y, y.exp()))
    pm = partition(model, devices=2, mode=mode, example_inputs=(x,))
    loss = pm.train_step(x, loss_fn=clamps_the_first)
    expected = clamps_the_first(model(x), None)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.full_gradients()[parameter_name], parameter.grad)


def test_a_loss_of_logits_beside_the_loss_that_the_model_returns() -> None:
    """The mean over the targets that count is not read, so that nothing of it need be proved."""
    x, target = labelled()
    model = Returning(MEANS["ignored_labels"])
    pm = partition(model, devices=2, mode="pipeline", n_microbatches=2, example_inputs=(x, target))
    loss = pm.train_step(x, target, loss_fn=lambda out, _: out["logits"].pow(2).mean())
    expected = model(x, target)["logits"].pow(2).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.full_gradients()[name], parameter.grad)


def test_a_function_of_the_loss_that_the_model_returns() -> None:
    """A term added to a mean over the targets that count is not proved, and taken of all rows if that is said."""
    x, target = labelled()
    model = Returning(MEANS["ignored_labels"])
    pm = partition(model, devices=2, mode="pipeline", n_microbatches=2, example_inputs=(x, target))

    def loss_fn(out: Any, _: Any) -> Tensor:
        loss: Tensor = out["loss"] + 0.1 * out["logits"].pow(2).mean()
        return loss

    with pytest.raises(ConfigError, match="results that leaves targets out"):
        pm.train_step(x, target, loss_fn=loss_fn)
    loss = pm.train_step(x, target, loss_fn=loss_fn, loss_reduction="batch")
    expected = loss_fn(model(x, target), None)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


# -- what is said of it ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_and_order_of_the_last_step_are_reported() -> None:
    x, target = labelled(rows=32)
    pm = partition(cases.model(), devices=2, mode="pipeline", n_microbatches=8, schedule="1F1B", example_inputs=(x,))
    pm.train_step(x, target=target, loss_fn=F.cross_entropy)
    by_microbatches, text = pm.simulate(), pm.explain()
    pm.train_step(x, target=target, loss_fn=NEITHER["root_mean_square"], loss_reduction="batch")
    of_all_rows = pm.simulate()
    assert max(of_all_rows.peak_memory) > max(by_microbatches.peak_memory)
    assert "loss of all rows" not in text
    assert "took a loss of all rows, for which every stage holds all microbatches" in pm.explain()
    sections = list(dict.fromkeys(str(node.meta["section"]) for node in pm.graph(1).graph.nodes if node.meta.get("section")))
    assert sections.index("1F7") < sections.index("loss of all rows") < sections.index("1B0")
    pm.verify()


def test_memory_over_the_limit_is_announced() -> None:
    x, target = labelled(rows=512)
    options: dict[str, Any] = {"mode": "pipeline", "n_microbatches": 16, "schedule": "1F1B", "optimizer": "none", "example_inputs": (x,)}
    pm = partition(cases.model(), devices=2, **options)
    with pytest.warns(
        PartitionWarning, match="train_step\\(\\) fits into the memory limit, and pm\\(...\\) followed by backward\\(\\) does not"
    ):
        tight = partition(cases.model(), devices=2, memory_limit=int(max(pm.plan.memory)) + 1, **options)
    with pytest.warns(UserWarning, match="holds all 16 microbatches on every rank: rank . is predicted to need"):
        tight.train_step(x, target=target, loss_fn=NEITHER["root_mean_square"], loss_reduction="batch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a model on the meta device is not called
        partition(cases.model().to("meta"), devices=2, memory_limit=int(max(pm.plan.memory)) + 1, **options)


# -- processes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["pipeline", "data"])
def test_processes_refuse_together(workers: Callable[[int], Workers], mode: str) -> None:
    remedy = 'ConfigError pass loss_reduction="batch": the loss is then taken of all rows at once, and is exact'
    assert workers(2).values(cases.refused_then_exact, mode, timeout=120) == [[remedy, "None", remedy, "None", "None", "None", "None"]] * 2


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_processes_with_rows_of_their_own(workers: Callable[[int], Workers]) -> None:
    expected = [None, "ConfigError", "ConfigError", *[None] * 6]
    assert workers(2).values(cases.trained_on_own_rows, timeout=120) == [expected] * 2


@pytest.mark.parametrize("mode", ["data", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("fsdp", "pipeline"))])
def test_a_loss_may_ask_which_results_have_gradients(mode: str) -> None:
    def loss_fn(results: Sequence[Tensor], _: Any) -> Tensor:
        return torch.stack([each.square().mean() for each in results if each.requires_grad]).sum()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(self.first(x))

    model, x = Two(), torch.randn(8, 4)
    other = copy.deepcopy(model)
    torch.testing.assert_close(partition(other, 2, mode, example_inputs=(x,)).train_step(x, loss_fn=loss_fn), loss_fn(model(x), None))


def test_a_loss_of_results_without_gradients_is_proved_as_it_is_computed() -> None:
    """It is a sum over the rows where results have no gradient, and a mean where they have."""

    def loss_fn(results: Sequence[Tensor], _: Any) -> Tensor:
        return torch.stack([each.mean() if each.requires_grad else each.sum() for each in results]).sum()

    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), 2 * x

    x = torch.rand(8, 4)
    with pytest.raises(ConfigError, match="not proved to be a mean"):
        partition(Passing(), 2, "data", example_inputs=(x,)).train_step(x, loss_fn=loss_fn)
    model = Passing()
    whole = partition(copy.deepcopy(model), 2, "data", example_inputs=(x,)).train_step(x, loss_fn=loss_fn, loss_reduction="batch")
    torch.testing.assert_close(whole, loss_fn(model(x), None))
