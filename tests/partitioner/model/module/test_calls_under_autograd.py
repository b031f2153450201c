"""A call of a partitioned model is one node of the user's autograd graph: the model's gradients, or a refusal where torch refuses, too."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from partitioner import ConfigError, PartitionedModel, partition
from tests.support.running.slow_values import all_but, slow

X, OTHER = torch.rand(8, 4, dtype=torch.float64), torch.rand(8, 4, dtype=torch.float64)


class Scaled(nn.Module):
    """Its backward reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        return x * self.scale


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.BatchNorm1d(6), Scaled()), nn.Sigmoid(), nn.Linear(6, 3), nn.Sigmoid()).double()


def parts(module: nn.Module, mode: str = "pipeline") -> PartitionedModel:
    options: dict[str, Any] = {"n_microbatches": 1} if mode == "pipeline" else {}
    return partition(module, 2, mode, example_inputs=(X,), progress=False, **options)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def assert_same(steps: Callable[[nn.Module], Any], mode: str = "pipeline") -> None:
    """Compare what some steps return, and the gradients that they leave, with those of the model."""
    reference, pm = model(), parts(model(), mode)
    torch.testing.assert_close(steps(pm), steps(reference), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(pm), gradients(reference), rtol=1e-12, atol=1e-12)


# -- values that are changed between the forward and the backward -------------------------------------------------------------------------


def input_changed(module: nn.Module) -> None:
    x = X.clone()
    y = module(x)
    x.mul_(2)
    y.sum().backward()


def result_changed(module: nn.Module) -> None:
    y = module(X)
    y.mul_(2)
    y.sum().backward()


def step_between(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    first, second = module(X), module(OTHER)
    first.sum().backward()
    optimizer.step()
    second.sum().backward()


def loaded_between(module: nn.Module) -> None:
    y = module(X)
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()})
    y.sum().backward()


CHANGED: dict[Callable[[nn.Module], None], str] = {
    input_changed: "input input",
    result_changed: "a result of the call",
    step_between: "3.weight",
    loaded_between: "1.1.scale",
}


@pytest.mark.parametrize("mode", ["pipeline", *slow("tensor")])
@pytest.mark.parametrize("steps", all_but([input_changed, step_between], CHANGED), ids=lambda steps: steps.__name__)
def test_a_backward_refuses_values_that_were_changed_after_its_forward(steps: Callable[[nn.Module], None], mode: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        steps(model())
    with pytest.raises(ConfigError, match=CHANGED[steps]) as caught:
        steps(parts(model(), mode))
    assert "call backward() first" in str(caught.value)


def two_calls(module: nn.Module) -> None:
    """Run two forwards, which write running statistics, and change the last layer, whose bias no backward reads."""
    first, second = module(X), module(OTHER)
    second.square().sum().backward()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.add_(1)
    (3 * first).sum().backward()


@pytest.mark.parametrize("mode", ["pipeline", *slow("data", "tensor", "fsdp")])
def test_a_change_of_what_no_backward_reads_is_allowed(mode: str) -> None:
    assert_same(two_calls, mode)


@pytest.mark.slow
def test_two_models_may_step_in_turn() -> None:
    """The order of a generator and a discriminator: each optimizer changes parameters that the other backward does not read."""

    def losses(generator: nn.Module, judge: nn.Module) -> list[Tensor]:
        steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, judge)]
        fake = generator(X)
        loss = judge(fake.detach().repeat(1, 2)[:, :4]).sum()
        loss.backward()
        steps[1].step()
        other = judge(fake.repeat(1, 2)[:, :4]).sum()
        other.backward()
        steps[0].step()
        return [loss, other, *generator.parameters()]

    expected = losses(model(), model())
    found = losses(parts(model()), parts(model()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- questions that autograd asks of a call -----------------------------------------------------------------------------------------------


def test_gradients_of_parameters_are_not_returned() -> None:
    pm = parts(model())
    with pytest.raises(ConfigError, match=r"torch.autograd.grad\(\) asks for gradients of parameters"):
        torch.autograd.grad(pm(X).sum(), list(pm.parameters()))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        return None


def test_a_result_may_get_no_gradient() -> None:
    def steps(module: nn.Module) -> Tensor | None:
        x = X.clone().requires_grad_()
        _Nothing.apply(module(x)).sum().backward()  # type: ignore[no-untyped-call]
        return x.grad

    assert_same(steps)


class _Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = model()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return y, y.float()


def test_results_without_a_gradient_keep_their_dtype() -> None:
    reference = _Casting()
    pm = parts(copy.deepcopy(reference))
    for module in (reference, pm):
        module(X)[0].sum().backward()
        module(X)[1].sum().backward()
    torch.testing.assert_close(gradients(pm), gradients(reference), rtol=1e-6, atol=1e-6)


def test_a_call_without_gradients_is_not_tracked() -> None:
    pm = parts(model())
    pm.requires_grad_(False)
    assert not pm(X).requires_grad
    assert pm(X.clone().requires_grad_()).requires_grad
    assert_same(lambda module: module.requires_grad_(False)(X))


# -- questions that the model asks of autograd --------------------------------------------------------------------------------------------


class Asking(nn.Module):
    """Doubles what it computes where gradients are on, or a tensor requires one."""

    def __init__(self, asks: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(2 * y if self.asks(x, y) else y)


def mode_of_gradients(_x: Tensor, _y: Tensor) -> bool:
    return torch.is_grad_enabled()


def hidden(_x: Tensor, y: Tensor) -> bool:
    return y.requires_grad


def given(x: Tensor, _y: Tensor) -> bool:
    return x.requires_grad


@pytest.mark.parametrize("mode", ["pipeline", *slow("data")])
@pytest.mark.parametrize("asks", [mode_of_gradients, *slow(hidden, given)])
def test_what_a_model_asks_of_autograd_is_answered_as_in_the_call(asks: Callable[[Tensor, Tensor], bool], mode: str) -> None:
    reference = Asking(asks)
    pm = parts(copy.deepcopy(reference), mode)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            torch.testing.assert_close(pm(X), reference(X), rtol=1e-12, atol=1e-12)
    for x in (X, X.clone().requires_grad_(), X):
        torch.testing.assert_close(pm(x), reference(x), rtol=1e-12, atol=1e-12)
        loss = pm.train_step(x, target=X[:, :3], loss_fn=nn.functional.mse_loss)
        expected = nn.functional.mse_loss(reference(x), X[:, :3])
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(pm), gradients(reference), rtol=1e-12, atol=1e-12)


def test_a_model_that_asks_for_gradients_is_refused_when_parameters_are_frozen_later() -> None:
    pm = parts(Asking(hidden))
    dict(pm.named_parameters())["first.weight"].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"first\.weight was frozen .* asks for Tensor\.requires_grad"):
        pm(X)


# -- what the user sets for autograd around the first call, which traces ------------------------------------------------------------------


def under_checkpoint(module: nn.Module) -> list[Tensor | None]:
    x = X.clone().requires_grad_()
    y = checkpoint(module, x, use_reentrant=False)
    y.square().sum().backward()
    return [y, x.grad]


def inside_checkpoint(module: nn.Module) -> list[Tensor | None]:
    """Recompute operations around the call, and the call with them."""
    x = X.clone().requires_grad_()
    y = checkpoint(lambda x: (2 * module(x.sin())).cos(), x, use_reentrant=False)
    y.sum().backward()
    return [y, x.grad]


def offloaded(module: nn.Module) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        y = module(X)
    y.sum().backward()
    return y


def anomalies_detected(module: nn.Module) -> Tensor:
    with torch.autograd.set_detect_anomaly(mode=True):
        y = module(X)
        y.sum().backward()
    return y


@pytest.mark.parametrize("mode", ["pipeline", *slow("data")])
@pytest.mark.parametrize(
    "steps", [under_checkpoint, *slow(inside_checkpoint, offloaded, anomalies_detected)], ids=lambda steps: steps.__name__
)
def test_a_first_call_traces_apart_from_the_autograd_around_it(steps: Callable[[nn.Module], Any], mode: str) -> None:
    assert_same(steps, mode)


@pytest.mark.parametrize("around", [torch.autograd.graph.save_on_cpu, *slow(lambda: torch.autograd.set_detect_anomaly(mode=True))])
def test_a_first_step_traces_apart_from_the_autograd_around_it(around: Callable[[], Any]) -> None:
    reference, pm = model(), parts(model())
    with around():
        loss = pm.train_step(X, target=X[:, :3], loss_fn=nn.functional.mse_loss)
    expected = nn.functional.mse_loss(reference(X), X[:, :3])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(pm), gradients(reference), rtol=1e-12, atol=1e-12)


def test_tangents_of_forward_mode_are_refused() -> None:
    model, x, target = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(6, 4), torch.randn(6, 2)
    pm = partition(model, 2, "model", example_inputs=(x,), progress=False)
    with forward_ad.dual_level():
        dual, dual_target = (forward_ad.make_dual(each, torch.ones_like(each)) for each in (x, target))
        calls: list[Callable[[], object]] = [
            lambda: pm(dual),
            lambda: nn.Sequential(nn.Linear(4, 4), pm)(dual),
            lambda: pm.train_step(dual, target=target, loss_fn=nn.functional.mse_loss),
            lambda: pm.train_step(x, target=dual_target, loss_fn=nn.functional.mse_loss),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="computes no tangents"):
                call()
        torch.testing.assert_close(pm(x), model(x))
    with pytest.raises(ConfigError, match=r"tangents|cannot transform"):
        torch.func.jvp(pm, (x,), (x,))
