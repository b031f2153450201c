"""Hooks of PyTorch on models and parameters, before and after partitioning: called as PyTorch calls them, or refused by name."""

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
from torch.nn.modules import module as global_hooks

from partitioner import ConfigError, PartitionedModel, partition
from tests.support.running.slow_values import slow

Mode = str | dict[str, int]
X, TARGET = torch.rand(8, 4, dtype=torch.float64), torch.rand(8, 3, dtype=torch.float64)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def close(found: Any, expected: Any, name: str | None = None) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)


def parts(module: nn.Module, mode: Mode = "data") -> PartitionedModel:
    return partition(module, 2, mode, example_inputs=(X,), progress=False)


def step(pm: PartitionedModel, how: str) -> None:
    if how == "train_step":
        pm.train_step(X, target=TARGET, loss_fn=square)
    else:
        square(pm(X), TARGET).backward()


def assert_same_gradients(reference: nn.Module, pm: PartitionedModel) -> None:
    found = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        close(found[name], parameter.grad, name)


def unit_gradient(gradient: Tensor) -> Tensor:
    """Right on a whole gradient alone."""
    return gradient / gradient.norm()


# -- of the model's modules --------------------------------------------------------------------------------------------------------------


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def halved(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 0.5,)


def test_what_forward_hooks_do_to_values_is_in_the_graph() -> None:
    """Also of one of several modules that are alike, and of the model itself."""
    reference = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).double()
    reference[2].register_forward_hook(doubled)
    reference[3].register_forward_pre_hook(halved)
    reference.register_forward_hook(doubled)
    with pytest.warns(UserWarning, match="hooks run once") as caught:
        pm = parts(reference)
    said = [str(warning.message) for warning in caught if "hooks run once" in str(warning.message)]
    assert len(said) == 1
    assert "(the model itself) (forward hook doubled), 2 (forward hook doubled), 3 (forward pre-hook halved)" in said[0]
    assert "not repeated when it runs" in said[0]
    assert caught[0].filename == __file__
    assert "hooks run once" in pm.explain()
    close(pm(X), reference(X))


def test_hooks_of_torch_itself_have_no_side_effects() -> None:
    reference = model()
    nn.utils.spectral_norm(reference[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        pm = parts(reference.eval(), "pipeline")
    close(pm(X), reference(X))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_refused(register: str) -> None:
    def watch(*_values: Any) -> None: ...

    reference = model()
    getattr(reference[2], register)(watch)
    with pytest.raises(ConfigError, match=r"the model has a backward (pre-)?hook, .*watch: the backward of a partitioned") as caught:
        parts(reference)
    assert "module 2" in str(caught.value)


@pytest.mark.parametrize("register", [*slow("forward_hook"), "forward_pre_hook", *slow("full_backward_hook", "full_backward_pre_hook")])
def test_hooks_of_all_modules_are_refused(register: str) -> None:
    reference = model()
    pm = parts(reference)
    handle = getattr(global_hooks, f"register_module_{register}")(lambda *_values: None)
    try:
        for call in (lambda: parts(reference), lambda: pm.train_step(X, target=TARGET, loss_fn=square)):
            with pytest.raises(ConfigError, match="registered for all modules"):
                call()
    finally:
        handle.remove()
    step(pm, "train_step")


# -- of parameters -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["train_step", *slow("backward")])
@pytest.mark.parametrize("mode", ["data", *slow("tensor", "fsdp", "pipeline")])
def test_tensor_hooks_of_the_model_see_whole_gradients(mode: Mode, how: str) -> None:
    """Each once a step, with the gradient of the step alone, whatever ``.grad`` holds."""
    reference = model()
    pm_model = copy.deepcopy(reference)  # a copy has no hooks
    calls: list[torch.Size] = []
    for module in (reference, pm_model):
        for parameter in module.parameters():
            parameter.register_hook(unit_gradient)
    next(iter(pm_model.parameters())).register_hook(lambda gradient: calls.append(gradient.shape))
    pm = parts(pm_model, mode)
    for _ in range(2):
        square(reference(X), TARGET).backward()
        step(pm, how)
    assert_same_gradients(reference, pm)
    assert calls == [torch.Size((6, 4))] * 2
    assert all(parameter.grad is None for parameter in pm_model.parameters())


@pytest.mark.parametrize("how", [*slow("train_step"), "backward"])
def test_hooks_of_the_parameters_of_the_partitioned_model(how: str) -> None:
    reference, pm = model(), parts(model(), "tensor")
    order: list[str] = []
    handles = []

    def clamped(gradient: Tensor) -> Tensor:
        order.append("tensor")
        return gradient.clamp(-0.01, 0.01)

    def tripled(parameter: Tensor) -> None:
        order.append("after")
        assert parameter.grad is not None
        parameter.grad.mul_(3.0)

    for module in (reference, pm):
        for parameter in module.parameters():
            handles.append(parameter.register_hook(clamped))
            handles.append(parameter.register_post_accumulate_grad_hook(tripled))
        if module is reference:
            square(reference(X), TARGET).backward()
        else:
            step(pm, how)
    count = len(list(model().parameters()))
    assert order == ["tensor", "after"] * 2 * count
    assert_same_gradients(reference, pm)
    for handle in handles:
        handle.remove()
    square(reference(X), TARGET).backward()
    step(pm, how)
    assert len(order) == 4 * count
    assert_same_gradients(reference, pm)


def test_an_optimizer_in_the_backward() -> None:
    """A hook updates its parameter and clears the gradient, as torch's tutorial has it."""

    def in_backward(module: nn.Module) -> None:
        optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in module.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            parameter.grad = None

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(update)

    reference, pm = model(), parts(model(), "tensor")
    in_backward(reference)
    in_backward(pm)
    for _ in range(3):
        square(reference(X), TARGET).backward()
        step(pm, "train_step")
    found = pm.full_state_dict()
    for name, value in reference.state_dict().items():
        close(found[name], value, name)


def test_hooks_of_several_gradients() -> None:
    pm = parts(model())
    seen: list[int] = []
    torch.autograd.graph.register_multi_grad_hook(list(pm.parameters()), lambda gradients: seen.append(len(gradients)))
    step(pm, "train_step")
    assert seen == [len(list(pm.parameters()))]


def test_hooks_that_are_given_the_models_parameter_are_refused() -> None:
    reference = model()
    reference.get_parameter("2.weight").register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigError, match=r"2\.weight has a post-accumulate hook"):
        parts(reference)


def test_hooks_are_refused_where_gradients_are_parts() -> None:
    pm = parts(model())
    handle = next(pm.parameters()).register_hook(unit_gradient)
    with pm.no_sync(), pytest.raises(ConfigError, match=r"0\.weight has a hook, and inside no_sync\(\)"):
        step(pm, "train_step")
    handle.remove()
    with pm.no_sync():
        step(pm, "train_step")


@pytest.mark.usefixtures("devices_apart")
def test_hooks_are_refused_where_a_parameter_lies_on_several_devices() -> None:
    pm = parts(model(), "tensor")
    named = list(pm.named_parameters())
    part = next(parameter for name, parameter in named if [each for each, _ in named].count(name) > 1)
    part.register_hook(unit_gradient)
    with pytest.raises(ConfigError, match="has a hook, and this process has a part of it"):
        step(pm, "train_step")


def test_hooks_stay_when_a_model_gets_values() -> None:
    with torch.device("meta"):
        empty = nn.Linear(4, 3).double()
    pm = parts(empty)
    seen: list[str] = []
    pm_weight = dict(pm.named_parameters())["weight"]
    pm_weight.register_hook(lambda _gradient: seen.append("tensor"))
    pm_weight.register_post_accumulate_grad_hook(lambda _parameter: seen.append("after"))
    pm.load_state_dict(nn.Linear(4, 3).double().state_dict())
    step(pm, "train_step")
    assert seen == ["tensor", "after"]


def test_a_check_compares_gradients_without_hooks() -> None:
    pm = parts(model())
    for parameter in pm.parameters():
        parameter.register_hook(torch.zeros_like)
    assert pm.check(X)


@pytest.mark.parametrize("how", [*slow("train_step"), "backward"])
def test_gradients_of_inputs_go_on_through_their_graph(how: str) -> None:
    """Hooks of inputs are called, and an input that something computed passes its gradient on."""
    found = []
    for module in (model(), parts(model())):
        front = torch.ones(4, dtype=torch.float64, requires_grad=True)
        inputs = X * front
        inputs.register_hook(lambda gradient: gradient * 2)
        if how == "train_step" and isinstance(module, PartitionedModel):
            module.train_step(inputs, target=TARGET, loss_fn=square)
        else:
            square(module(inputs), TARGET).backward()
        found.append(front.grad)
    close(found[1], found[0])


# -- of the partitioned model ------------------------------------------------------------------------------------------------------------


def test_hooks_of_the_partitioned_model_are_called_by_calls() -> None:
    reference, pm = model(), parts(model())
    seen: list[Any] = []
    inputs: list[Tensor] = []

    def watch(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        seen.append(outputs[0].clone())

    for module in (reference, pm):
        module.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5,))
        module.register_forward_hook(lambda _module, _args, output: output * 3)
        module.register_full_backward_hook(watch)
        inputs.append(X.clone().requires_grad_())
        square(module(inputs[-1]), TARGET).backward()
    close(pm(inputs[0]), reference(inputs[0]))
    close(inputs[1].grad, inputs[0].grad)
    close(seen[1], seen[0])
    assert_same_gradients(reference, pm)


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        pytest.param("register_forward_hook", "forward hook", marks=pytest.mark.slow),
        pytest.param("register_forward_pre_hook", "forward pre-hook", marks=pytest.mark.slow),
        ("register_full_backward_hook", "backward hook"),
    ],
)
def test_a_step_refuses_hooks_that_it_does_not_call(register: str, kind: str) -> None:
    pm = parts(model())
    handle = getattr(pm, register)(doubled)
    with pytest.raises(ConfigError, match=f"the partitioned model has a {kind}, doubled, which train_step") as caught:
        step(pm, "train_step")
    assert ".backward()" in str(caught.value)
    handle.remove()
    step(pm, "train_step")


@pytest.mark.parametrize(
    ("register", "call"),
    [
        ("register_state_dict_post_hook", lambda pm: pm.state_dict()),
        ("register_state_dict_pre_hook", lambda pm: pm.state_dict()),
        ("register_load_state_dict_pre_hook", lambda pm: pm.load_state_dict(model().state_dict())),
        ("register_load_state_dict_post_hook", lambda pm: pm.load_state_dict(model().state_dict())),
    ],
)
def test_hooks_of_the_state_are_refused(register: str, call: Callable[[PartitionedModel], Any]) -> None:
    pm = parts(model())
    getattr(pm, register)(lambda *_values: None)
    with pytest.raises(ConfigError, match=r"state_dict (pre-|post-)?hook"):
        call(pm)
