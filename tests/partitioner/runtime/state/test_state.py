"""A state that does not fit is refused, naming the entry, and nothing of it is loaded; one that fits loads as in ``nn.Module``."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from partitioner import ConfigError, PartitionedModel, partition
from partitioner.runtime.state import gradient_slots, materialize
from tests.support.running.slow_values import slow

X, TARGET = torch.rand(8, 4, dtype=torch.float64), torch.rand(8, 3, dtype=torch.float64)
Make = Callable[[nn.Module], Optimizer]
State = dict[str, Any]


class Net(nn.Module):
    """A layer, a norm with statistics, and a weight that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.down = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map any number of rows."""
        return self.down(torch.tanh(self.norm(self.up(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture(scope="module")
def shared() -> PartitionedModel:
    return partition(model(), 2, "tensor", example_inputs=(X,), progress=False)


@pytest.fixture
def pm(shared: PartitionedModel) -> PartitionedModel:
    shared.load_state_dict(model().state_dict())
    shared.zero_grad()
    return shared


def trained(module: nn.Module, make: Make) -> Optimizer:
    """Return the module's optimizer after two steps."""
    optimizer = make(module)
    for _ in range(2):
        optimizer.zero_grad()
        if isinstance(module, PartitionedModel):
            module.train_step(X, target=TARGET, loss_fn=nn.functional.mse_loss)
        else:
            nn.functional.mse_loss(module(X), TARGET).backward()
        optimizer.step()
    return optimizer


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def adafactor(module: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=1e-2)


# -- of the model --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"up.weight": torch.zeros(6, 4, dtype=torch.complex128)}, "up.weight has dtype torch.complex128 in the state and torch.float64"),
        ({"norm.num_batches_tracked": torch.tensor(2.5)}, "norm.num_batches_tracked has dtype torch.float32 in the state and torch.int64"),
        ({"down.bias": torch.zeros(4)}, r"down.bias has shape (4,) in the state and (3,) in the model"),
        ({"down.bias": [0.0, 0.0, 0.0]}, "down.bias is a list in the state, and a tensor in the model"),
        ({"down.bias": torch.zeros(3, device="meta")}, "down.bias is on the meta device"),
        ({"wheel": torch.zeros(1)}, "unknown names in the state: wheel"),
        ({"up.bias": None}, "the state lacks up.bias"),
    ],
)
def test_entries_that_do_not_fit(pm: PartitionedModel, changes: Mapping[str, Any], words: str) -> None:
    before = {name: value.clone() for name, value in pm.full_state_dict().items()}
    state: State = {name: value + 1 for name, value in model().state_dict().items()}
    for name, value in changes.items():
        state[name] = value
        if value is None:
            del state[name]
    with pytest.raises(ConfigError) as caught:
        pm.load_state_dict(state)
    assert words in str(caught.value)
    assert caught.value.remedy
    for name, value in pm.full_state_dict().items():
        assert torch.equal(value, before[name]), name


def test_other_kinds_of_states(pm: PartitionedModel) -> None:
    with pytest.raises(ConfigError, match="state_dict must be a mapping"):
        pm.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="assign=True"):
        pm.load_state_dict(model().state_dict(), assign=True)


def test_what_fits_is_loaded_as_a_module_loads_it(pm: PartitionedModel) -> None:
    """Another precision is converted; without ``strict``, missing entries keep their values and unknown ones are reported."""
    reference = model()
    state = {name: value.float() * 0.5 if value.is_floating_point() else value for name, value in reference.state_dict().items()}
    assert str(pm.load_state_dict(state)) == str(reference.load_state_dict(state))
    part = {"up.weight": torch.ones(6, 4), "norm.num_batches_tracked": torch.tensor(3), "wheel": torch.zeros(1)}
    expected, found = reference.load_state_dict(part, strict=False), pm.load_state_dict(part, strict=False)
    assert found == expected
    assert found.unexpected_keys == ["wheel"]
    for name, value in reference.state_dict().items():
        assert torch.equal(pm.full_state_dict()[name], value), name


class WithExtraState(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None: ...


def test_entries_of_the_original_that_are_no_tensors() -> None:
    pm = partition(WithExtraState(4, 3).double(), 2, "data", example_inputs=(X,), progress=False)
    pm.train_step(X, target=TARGET, loss_fn=nn.functional.mse_loss)
    for call in (pm.state_dict, pm.full_state_dict, pm.sharded_state_dict, lambda: pm.load_state_dict({})):
        with pytest.raises(ConfigError, match="has _extra_state, which is no parameter and no buffer"):
            call()


@pytest.mark.parametrize("mode", ["fsdp", *slow("pipeline", "data")])
def test_entries_that_a_wrapper_of_torch_renames(mode: str) -> None:
    """Checkpoints of models with and without wrappers are the same, as FSDP's are."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    model = copy.deepcopy(plain)
    model[0], model[2] = checkpoint_wrapper(model[0]), checkpoint_wrapper(model[2])
    pm = partition(model, 2, mode, example_inputs=(X,), n_microbatches=1, progress=False)
    for module in (plain, pm):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        nn.functional.mse_loss(module(X), TARGET).backward()
        optimizer.step()
    expected = plain.state_dict()
    for saved in (pm.state_dict(), pm.full_state_dict()):
        assert list(saved) == list(expected)
        torch.testing.assert_close(dict(saved), dict(expected), rtol=1e-9, atol=1e-9)
    assert set(pm.sharded_state_dict()) >= {"1.running_mean"}
    halves = {key: value / 2 if value.is_floating_point() else value for key, value in expected.items()}
    assert str(pm.load_state_dict(halves)) == "<All keys matched successfully>"
    torch.testing.assert_close(pm.full_state_dict(), halves, rtol=0, atol=0)


# -- of optimizers -------------------------------------------------------------------------------------------------------------------


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-2)


def momentum(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        (adamw, sgd, "class SGD: the options of its group 0 lack dampening, momentum, nesterov"),
        pytest.param(momentum, adamw, "class AdamW: the options of its group 0 lack amsgrad, betas, eps", marks=pytest.mark.slow),
        (adamw, lambda module: torch.optim.Adam(module.parameters()), "decoupled_weight_decay of its group 0 is True, and here False"),
        (adamw, lambda module: torch.optim.Adamax(module.parameters()), "the state of up.weight lacks exp_inf"),
        (adamw, adafactor, "class Adafactor: the options of its group 0 lack beta2_decay, d"),
    ],
)
def test_the_state_of_another_kind_of_optimizer(pm: PartitionedModel, saved: Make, loaded: Make, words: str) -> None:
    state = pm.full_optimizer_state_dict(trained(pm, saved))
    optimizer = loaded(pm)
    with pytest.raises(ConfigError) as caught:
        pm.load_optimizer_state_dict(optimizer, state)
    assert words in str(caught.value)
    assert not optimizer.state


def without_parameter(state: State) -> State:
    del state["state"]["down.weight"]
    return state


def with_entry(name: str, what: str, value: Any) -> Callable[[State], State]:
    def changed(state: State) -> State:
        state["state"][name][what] = value
        if value is None:
            del state["state"][name][what]
        return state

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_parameter, "the optimizer's state lacks down.weight"),
        (with_entry("up.bias", "exp_avg", None), "the state of up.bias lacks exp_avg"),
        (with_entry("up.bias", "velocity", torch.zeros(6)), "the state of up.bias has velocity"),
        (with_entry("up.bias", "exp_avg", torch.zeros(5)), "exp_avg of up.bias has shape (5,) in the state, and (6,) in the optimizer"),
        (with_entry("up.bias", "exp_avg", torch.tensor(0.0)), "exp_avg of up.bias has shape () in the state, and (6,) in the optimizer"),
        (with_entry("up.bias", "exp_avg", torch.zeros(6, dtype=torch.complex64)), "exp_avg of up.bias has dtype torch.complex64"),
        (lambda state: state["state"], "the optimizer's state has no 'state'"),
        (lambda state: {**state, "param_groups": 3}, "'param_groups' of the optimizer's state is no list"),
        (lambda state: {**state, "state": {0: {}}}, "the optimizer's state is by number"),
        (lambda state: [], "state_dict must be a mapping of str to anything, not []"),
    ],
)
def test_states_of_optimizers_that_do_not_fit(pm: PartitionedModel, change: Callable[[State], Any], words: str) -> None:
    state = change(pm.full_optimizer_state_dict(trained(pm, adamw)))
    optimizer = adamw(pm)
    with pytest.raises(ConfigError) as caught:
        pm.load_optimizer_state_dict(optimizer, state)
    assert words in str(caught.value)
    assert not optimizer.state


@pytest.mark.parametrize("make", [adamw, momentum, sgd, adafactor])
def test_states_of_optimizers_go_on(pm: PartitionedModel, make: Make) -> None:
    """That of the model goes on in a partitioned model, and that of a partitioned model in another one. Nothing has a state but no use."""
    reference = model()
    optimizer = trained(reference, make)
    theirs: Any = get_optimizer_state_dict(reference, optimizer)
    first = trained(pm, make)
    state = pm.full_optimizer_state_dict(first)
    if state["state"]:
        assert state["state"]["unused.weight"] == {}
        theirs["state"].update({name: {} for name in ("unused.weight", "unused.bias")})
    for given in (copy.deepcopy(state), theirs):
        pm.load_state_dict(reference.state_dict())
        second = make(pm)
        pm.load_optimizer_state_dict(second, given)
        before = pm.full_optimizer_state_dict(second)["state"]
        assert before.keys() == state["state"].keys()
        torch.testing.assert_close(before, state["state"], rtol=1e-9, atol=1e-12)


def test_an_optimizer_that_keeps_lists() -> None:
    """L-BFGS keeps lists of directions; a step after loading is that without it."""

    def step(pm: PartitionedModel, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step(lambda: float(pm.train_step(X, target=TARGET, loss_fn=nn.functional.mse_loss)))

    def made() -> tuple[PartitionedModel, torch.optim.Optimizer]:
        pm = partition(nn.Linear(4, 3).double(), 2, "data", example_inputs=(X,), progress=False)
        return pm, torch.optim.LBFGS(pm.parameters(), max_iter=4)

    (pm, optimizer), (other, second) = made(), made()
    step(pm, optimizer)
    other.load_state_dict(pm.full_state_dict())
    other.load_optimizer_state_dict(second, copy.deepcopy(pm.full_optimizer_state_dict(optimizer)))
    for model, each in ((pm, optimizer), (other, second)):
        model.zero_grad()
        step(model, each)
    torch.testing.assert_close(other.full_state_dict(), pm.full_state_dict(), rtol=0, atol=0)


def test_an_optimizer_of_other_parameters(pm: PartitionedModel) -> None:
    """Of the original model, or of another module besides."""
    state = pm.full_optimizer_state_dict(adamw(pm))
    for optimizer in (adamw(model()), torch.optim.AdamW([*pm.parameters(), *nn.Linear(2, 2).parameters()])):
        for call in (
            pm.full_optimizer_state_dict,
            pm.sharded_optimizer_state_dict,
            lambda given: pm.load_optimizer_state_dict(given, state),
        ):
            with pytest.raises(ConfigError, match=r"of group 0 of the optimizer, of shape .* is none of this model's"):
                call(optimizer)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda pm: pm.apply(lambda module: None), "parts of the parameters of a layer"),
    ],
)
def test_what_a_partitioned_model_is_not_made_for_is_refused(pm: PartitionedModel, call: Callable[[nn.Module], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        call(pm)
    assert "remedy: " in str(caught.value)


def test_ranks_are_bound_when_they_run() -> None:
    """Plans for thousands of ranks are made in one process, which runs none of them."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(16, 8)
    with mock.patch.object(materialize, "ParameterSlot", wraps=gradient_slots.ParameterSlot) as made:
        pm = partition(model, devices=4, mode={"data": 2, "tensor": 2}, example_inputs=(x,))
        assert made.call_count == 0
        torch.testing.assert_close(pm(x), model(x))
        assert made.call_count == 4 * len(list(model.parameters()))
