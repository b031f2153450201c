"""Steps inside of calls: gradients are those of the model, actions those of the schedule, and what a loop reads besides is right."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError, PartitionWarning
from tests.support.running.slow_values import all_but

ROWS, WIDTH, CLASSES = 8, 8, 3
READS = "the loop reads a result besides the loss"


class Classifier(nn.Module):
    """Returns its loss, when it is given labels, and logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64), torch.randint(CLASSES, (ROWS,), generator=generator)


def partitioned(model: nn.Module, devices: int = 2, mode: Any = "pipeline", **options: Any) -> PartitionedModel:
    x, labels = batch()
    options = {"schedule": "1F1B", "n_microbatches": 4, **options}
    return partition(model, devices, mode, example_inputs=(x,), example_kwargs={"labels": labels}, progress=False, **options)


def trained(pm: PartitionedModel) -> str:
    """Return the actions of the last rank in a call and the backward of its loss."""
    x, labels = batch()

    def run() -> None:
        pm(x, labels=labels)["loss"].backward()

    return order(run, pm)


def order(run: Callable[[], object], pm: PartitionedModel) -> str:
    """Return the actions of the last rank in a run: ``"FBFBFBFB"``."""
    with pm.record() as recording:
        run()
    sections = [
        each.section for each in recording.timeline.computed if each.rank == pm.plan.n_ranks - 1 and each.section[1:2] in ("F", "B")
    ]
    return "".join(section[1] for section in dict.fromkeys(sections))


def check_gradients(pm: PartitionedModel, model: nn.Module) -> None:
    found = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=f"of {name}")


MESHES: dict[str, tuple[int, Any]] = {
    "pipeline of 2": (2, "pipeline"),
    "pipeline of 4": (4, "pipeline"),
    "data": (4, {"data": 2, "pipeline": 2}),
    "tensor": (4, {"pipeline": 2, "tensor": 2}),
    "fsdp": (4, {"pipeline": 2, "fsdp": 2}),
    "shared stage": (3, {"pipeline": (2, 1)}),
}


@pytest.mark.parametrize("mesh", all_but(["pipeline of 2"], MESHES))
def test_accumulated_steps_have_the_gradients_of_the_model(mesh: str) -> None:
    devices, mode = MESHES[mesh]
    model = Classifier()
    pm = partitioned(copy.deepcopy(model), devices, mode)
    orders = []
    for seed in range(3):
        x, labels = batch(seed)

        def step(x: Tensor = x, labels: Tensor = labels) -> None:
            with pm.loss_in_step.on():
                loss = pm(x, labels=labels)["loss"]
            (loss / 3).backward()
            torch.testing.assert_close(loss, model(x, labels=labels)["loss"])

        orders.append(order(step, pm))
        (model(x, labels=labels)["loss"] / 3).backward()
        check_gradients(pm, model)
    assert len(set(orders)) == 1
    assert "BF" in orders[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZB1P", "ZBV", "DualPipeV"])
def test_every_schedule_is_run(schedule: str) -> None:
    model = Classifier()
    pm = partitioned(copy.deepcopy(model), schedule=schedule)
    x, labels = batch()
    with pm.loss_in_step.on():
        pm(x, labels=labels)["loss"].backward()
    model(x, labels=labels)["loss"].backward()
    check_gradients(pm, model)


def test_a_loss_in_a_step_holds_the_activations_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cost_models.simulator.test_simulated_memory import measured  # noqa: PLC0415  it partitions models of its own

    pm = partitioned(Classifier(), n_microbatches=8)
    x, labels = batch()

    def step() -> None:
        pm(x, labels=labels)["loss"].backward()

    step()
    pm.zero_grad()
    all_forwards = measured(step, monkeypatch)
    pm.zero_grad()
    with pm.loss_in_step.on():
        step()
        pm.zero_grad()
        by_schedule = measured(step, monkeypatch)
    assert all(by_schedule[rank] < all_forwards[rank] for rank in by_schedule)


def test_gradients_wait_for_backward() -> None:
    """Lightning clears gradients between loss and backward; a loss of no number, or one that is left alone, adds nothing."""
    model = Classifier()
    pm = partitioned(copy.deepcopy(model))
    x, labels = batch()
    with pm.loss_in_step.on():
        for parameter in pm.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss = pm(x, labels=labels)["loss"]
        assert all(bool((parameter.grad == 1).all()) for parameter in pm.parameters() if parameter.grad is not None)
        pm.zero_grad()
        pm(x, labels=labels)  # never differentiated
        loss.backward()
    model(x, labels=labels)["loss"].backward()
    check_gradients(pm, model)
    with pytest.raises(ConfigError, match="the backward of this call has run already"):
        loss.backward()


def test_inputs_get_their_gradients_and_backward_of_inputs_alone_adds_no_others() -> None:
    model = Classifier()
    pm = partitioned(copy.deepcopy(model))
    x, labels = batch()
    own, twin = x.clone().requires_grad_(), x.clone().requires_grad_()
    with pm.loss_in_step.on():
        (gradient,) = torch.autograd.grad(3 * pm(own, labels=labels)["loss"], own)
        assert all(parameter.grad is None for parameter in pm.parameters())
        (2 * pm(2 * own, labels=labels)["loss"]).backward()
    (expected,) = torch.autograd.grad(3 * model(twin, labels=labels)["loss"], twin)
    torch.testing.assert_close(gradient, expected)
    (2 * model(2 * twin, labels=labels)["loss"]).backward()
    torch.testing.assert_close(own.grad, twin.grad)
    check_gradients(pm, model)


def test_a_result_that_is_read_is_that_of_the_call_and_differentiable() -> None:
    model = Classifier()
    pm = partitioned(copy.deepcopy(model))
    x, labels = batch()

    def total(each: nn.Module) -> Tensor:
        output = each(x, labels=labels)
        assert output["logits"].shape == (ROWS, CLASSES)
        return output["loss"] + output["logits"].pow(2).mean()

    with pm.loss_in_step.on():
        with pytest.warns(PartitionWarning, match=READS):
            total(pm).backward()
        total(model).backward()
        check_gradients(pm, model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            assert order(lambda: total(pm).backward(), pm) == "FFFFBBBB"
        total(model).backward()
        check_gradients(pm, model)


@pytest.mark.slow
def test_results_that_a_loop_keeps_are_computed_before_anything_changes() -> None:
    model = Classifier()
    pm = partitioned(copy.deepcopy(model))
    x, labels = batch()
    with pytest.warns(PartitionWarning, match=READS), pm.loss_in_step.on():
        kept = pm(x, labels=labels)
    kept["loss"].backward()
    torch.optim.SGD(pm.parameters(), lr=1.0).step()
    torch.testing.assert_close(kept["logits"], model(x, labels=labels)["logits"])


def test_results_of_values_that_have_changed_are_refused() -> None:
    pm = partitioned(Classifier())
    x, labels = batch()
    pm.loss_in_step.switch_on()
    output = pm(x, labels=labels)
    output["loss"].backward()
    torch.optim.SGD(pm.parameters(), lr=1.0).step()
    with pytest.warns(PartitionWarning, match=READS), pytest.raises(ConfigError, match=r"read after changes to blocks\.0\.0\.weight"):
        output["logits"].argmax(-1)


@pytest.mark.slow
def test_a_model_that_draws_is_watched_in_its_first_call() -> None:
    pm = partitioned(Classifier(dropout=0.5))
    pm.loss_in_step.switch_on()
    assert trained(pm) == "FFFFBBBB"
    assert trained(pm).startswith("FBF")
    other = partitioned(Classifier(dropout=0.5))
    other.loss_in_step.switch_on()
    x, labels = batch()
    output = other(x, labels=labels)
    with pytest.warns(PartitionWarning, match=READS):
        torch.testing.assert_close(nn.functional.cross_entropy(output["logits"], labels), output["loss"])
    assert trained(other) == "FFFFBBBB"


@pytest.mark.slow
def test_what_cannot_be_exact_runs_all_forwards_first_and_says_why() -> None:
    x, labels = batch()
    model = Classifier()
    pm = partitioned(copy.deepcopy(model))
    pm.loss_in_step.switch_on()
    with pytest.warns(PartitionWarning, match="the call returns no loss of its own"):
        nn.functional.cross_entropy(pm(x)["logits"], labels).backward()
    model(x, labels=labels)["loss"].backward()
    check_gradients(pm, model)
    handle = next(pm.parameters()).register_hook(lambda gradient: 2 * gradient)
    with pytest.warns(PartitionWarning, match="a parameter has a hook"):
        pm(x, labels=labels)["loss"].backward()
    handle.remove()
    with pytest.raises(ConfigError, match="no second derivatives"):
        pm(x, labels=labels)["loss"].backward(create_graph=True)


@pytest.mark.slow
def test_calls_that_train_nothing_are_as_before() -> None:
    pm = partitioned(Classifier())
    x, labels = batch()
    pm.loss_in_step.switch_on()
    with torch.no_grad():
        assert type(pm(x, labels=labels)["logits"]) is Tensor
    pm.eval()
    assert type(pm(x, labels=labels)["logits"]) is Tensor
    assert all(parameter.grad is None for parameter in pm.parameters())


@pytest.mark.slow
def test_accumulation_without_communication_sums_in_each_step() -> None:
    model = Classifier()
    pm = partitioned(copy.deepcopy(model), 4, {"data": 2, "pipeline": 2})
    x, labels = batch()
    pm.loss_in_step.switch_on()
    with pm.no_sync():
        pm(x, labels=labels)["loss"].backward()
    pm(x, labels=labels)["loss"].backward()
    for _ in range(2):
        model(x, labels=labels)["loss"].backward()
    check_gradients(pm, model)
    norm = pm.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    check_gradients(pm, model)
