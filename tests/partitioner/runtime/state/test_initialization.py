"""Models on the meta device get the values that one device would have given them, and no process holds more than a module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError
from tests.support.models.zoo import case_named
from tests.support.processes import initialization_cases as cases
from tests.support.processes.initialization_cases import Mode, initialized_difference, on_meta, reset
from tests.support.processes.processes import Workers


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("gpt", "pipeline", marks=pytest.mark.slow),
        pytest.param("gpt", "fsdp", marks=pytest.mark.slow),
        pytest.param("batch_norm_convolution", "tensor", marks=pytest.mark.slow),
        pytest.param("padded_attention", "tensor", marks=pytest.mark.slow),
        ("shared_layer", {"fsdp": 2, "pipeline": 2}),
    ],
    ids=str,
)
def test_values_are_those_of_one_device(name: str, mode: Mode) -> None:
    """Tied weights, statistics of batch normalisation, and attention that sets a bias of its projection."""
    assert initialized_difference(name, mode, 4 if isinstance(mode, dict) else 2) is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "fsdp", "pipeline", {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "unet", "encoder_decoder", "lstm", "nested_outputs", "residual"])
def test_models(name: str, mode: Mode) -> None:
    assert initialized_difference(name, mode, 4 if isinstance(mode, dict) else 2) is None


@pytest.mark.slow
@pytest.mark.gloo
def test_processes(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(cases.initialized_difference, "padded_attention", "fsdp", 2, timeout=120) == [None, None]
    for answer in workers(2).call(cases.initialize_from_unlike_seeds):
        assert isinstance(answer.error, ConfigError)
        assert "seed" in str(answer.error)


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))


def on_two(model: Callable[[], nn.Module], mode: str = "fsdp", size: int = 16) -> PartitionedModel:
    return partition(on_meta(model), 2, mode, example_inputs=(torch.randn(4, size, dtype=torch.float64),), progress=False)


def test_one_module_at_a_time() -> None:
    """A function sees its own module real and everything else on the meta device, also afterwards."""
    pm = on_two(deep)
    original = pm.traced.original
    seen: list[list[str]] = []

    def init(module: nn.Module) -> None:
        seen.append([name for name, parameter in original.named_parameters() if not parameter.is_meta])
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            module.bias.data.fill_(0.5)

    pm.initialize(init, seed=0)
    assert seen == [*([f"{layer}.weight", f"{layer}.bias"] for layer in range(5)), []]
    assert all(parameter.is_meta for parameter in original.parameters())
    assert torch.equal(pm.full_state_dict()["3.bias"], torch.full((16,), 0.5, dtype=torch.float64))


def test_a_function_that_reaches_into_children() -> None:
    """As some models scale the projections of a block from the block: values that are there already are changed."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if isinstance(module, nn.Sequential):
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if name == "3.weight":
                        parameter.mul_(0.25)

    pm, reference = on_two(deep), deep().double()
    pm.initialize(init, seed=7)
    torch.manual_seed(7)
    reference.apply(init)
    for name, tensor in pm.full_state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name


def test_the_random_state_is_put_back_with_a_seed_and_goes_on_without() -> None:
    pm = on_two(deep)
    before = torch.get_rng_state()
    pm.initialize(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    pm, reference = on_two(deep), deep().double()
    torch.manual_seed(11)
    pm.initialize()
    torch.manual_seed(11)
    reference.apply(reset)
    assert torch.equal(pm.full_state_dict()["4.weight"], reference.state_dict()["4.weight"])


@pytest.mark.slow
def test_training_and_check_afterwards() -> None:
    """An optimizer that was made before holds the same parameters."""
    case = case_named("gpt")
    instance = case.build()
    pm = partition(on_meta(case.model), 2, "fsdp", example_inputs=instance.args, progress=False)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.1)
    pm.initialize(seed=0)
    assert pm.check(*instance.args)
    losses = []
    for _ in range(2):
        losses.append(pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]


def test_a_state_gives_values_too() -> None:
    pm, reference = on_two(deep, "tensor"), deep().double()
    pm.load_state_dict(reference.state_dict())
    x = torch.randn(4, 16, dtype=torch.float64)
    torch.testing.assert_close(pm(x), reference(x))


class Rotary(nn.Module):
    """Holds what its constructor computes."""

    inv_freq: Tensor

    def __init__(self, base: int = 100, *, keeps: bool = False) -> None:
        super().__init__()
        if keeps:
            self.base, self.keeps = base, keeps
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x * self.inv_freq)
        return result


def test_what_a_constructor_computes_is_asked_for_by_name() -> None:
    pm = on_two(Rotary, "tensor", 4)
    with pytest.raises(ConfigError, match=r"reset_parameters\(\) gave no value to inv_freq") as raised:
        pm.initialize()
    assert "that a constructor computes" in str(raised.value)
    pm.load_state_dict(Rotary().double().state_dict())
    with pytest.raises(ConfigError, match="its constructor alone knows the values of inv_freq: Rotary does not keep its argument 'base'"):
        pm(torch.randn(4, 4, dtype=torch.float64))

    def init(module: nn.Module) -> None:
        reset(module)
        if isinstance(module, Rotary):
            module.inv_freq = Rotary().inv_freq.double()

    pm.initialize(init, seed=0)
    torch.manual_seed(0)
    reference = Rotary().double()
    torch.manual_seed(0)
    reference.apply(reset)
    x = torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(pm(x), reference(x))


@pytest.mark.parametrize("how", ["initialize", pytest.param("load_state_dict", marks=pytest.mark.slow)])
def test_what_a_constructor_computes_of_arguments_that_it_keeps_is_computed(how: str) -> None:
    pm, reference = on_two(lambda: Rotary(50, keeps=True), "tensor", 4), Rotary(50, keeps=True).double()
    if how == "initialize":
        pm.initialize(seed=0)
        torch.manual_seed(0)
        reference.apply(reset)
    else:
        pm.load_state_dict(reference.state_dict())
    x = torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(pm(x), reference(x))


def test_what_no_function_sets_is_named() -> None:
    pm = on_two(deep)
    with pytest.raises(ConfigError, match=r"init_fn gave no value to 0.bias, 1.bias, 2.bias and 2 more"):
        pm.initialize(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None)
    assert all(parameter.is_meta for parameter in pm.traced.original.parameters())


def test_a_wrong_shape_is_named() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))

    with pytest.raises(ConfigError, match=r"init_fn made 0.weight of shape \(3, 3\); the model has \(16, 16\)"):
        on_two(deep).initialize(init)
