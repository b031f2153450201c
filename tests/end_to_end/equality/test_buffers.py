"""Buffers are after a step, and after a call, what the model makes of them, whatever cuts the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, PartitionWarning, partition
from partitioner.tracing.trace import trace
from passes.ir.errors import PartitionError
from tests.end_to_end.equality.test_mutation import MODES
from tests.support.running.writing_models import BUFFERS, Layers, assert_trains_as_original, example, refusal


class UnreadNorm(nn.Module):
    """Batch normalisation that is called for its statistics alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        self.norm(y)
        z: Tensor = self.last(y.tanh())
        return z


class SharedNorm(nn.Module):
    """Batch normalisation that is called for images, whose height tiles cut, and for their means, which they do not.

    Args:
        calls: in order, of "images", "means"; with "unread " in front calls with unread results.
    """

    def __init__(self, *calls: str, affine: bool = True) -> None:
        super().__init__()
        self.calls = calls
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, affine=affine), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        values = {"images": self.first(x)}
        values["means"] = values["images"].tanh().mean((2, 3), keepdim=True)
        for call in self.calls:
            name = call.split()[-1]
            found = self.norm(values[name])
            values[name] = values[name] if call.startswith("unread") else found
        z: Tensor = self.last(values["images"] * values["means"])
        return z


class PassedAverages(nn.Module):
    """Batch normalisation that is given what a write of its buffers returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.get_buffer("mean").mul_(0.7), self.get_buffer("variance").add_(0.1)
        y = nn.functional.batch_norm(self.first(x), mean, variance, training=True)
        z: Tensor = self.last(y.tanh())
        return z


def spectral(normalize: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(normalize(nn.Linear(8, 16)), nn.Tanh(), normalize(nn.Linear(16, 16)), nn.Tanh(), normalize(nn.Linear(16, 8)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda name=name: Layers(*BUFFERS[name])) for name in BUFFERS},  # type: ignore[misc]
    "spectral_norm": lambda: spectral(nn.utils.spectral_norm),
    "spectral_norm_parametrization": lambda: spectral(nn.utils.parametrizations.spectral_norm),
    "unread_norm": UnreadNorm,
    "passed_averages": PassedAverages,
}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


class ScaledForEvaluation(nn.Module):
    """Two results; evaluation scales both by a buffer that training does not read, or that it writes for the first one alone.

    Args:
        is_trained: whether training writes it.
    """

    scale: Tensor

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.first, self.last, self.is_trained = nn.Linear(8, 8), nn.Linear(8, 8), is_trained
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        z = self.last(y.tanh())
        if not self.training:
            return y * self.scale, z * self.scale
        if self.is_trained:
            with torch.no_grad():
                self.scale.lerp_(y.mean(0), 0.5)
        return y, z


class CachedForEvaluation(nn.Module):
    """Evaluation adds its results to a cache. A mask is computed from a buffer, which every stage may do for itself.

    Args:
        masked_by: the buffer that the mask is computed from.
    """

    cache: Tensor
    limit: Tensor

    def __init__(self, masked_by: str) -> None:
        super().__init__()
        self.first, self.last, self.masked_by = nn.Linear(8, 8), nn.Linear(8, 8), masked_by
        self.register_buffer("cache", torch.zeros(8))
        self.register_buffer("limit", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(self.first(x).tanh()) * (self.get_buffer(self.masked_by) < 0.5)
        if self.training:
            return z
        self.cache.add_(z.detach().mean(0))
        return z + self.cache


def test_evaluation_writes_a_buffer_that_training_does_not_read() -> None:
    """It is held where the other buffer is read for a result, not where stages could read that."""
    model, x = CachedForEvaluation("limit").double(), torch.randn(8, 8, dtype=torch.float64)
    pm = partition(model, 4, {"pipeline": 2, "fsdp": 2}, example_inputs=(x,))
    for each in (model, pm):
        each.eval()
    for _ in range(3):
        torch.testing.assert_close(pm(x), model(x))
    torch.testing.assert_close(pm.full_state_dict()["cache"], model.cache)


def test_evaluation_that_writes_a_buffer_which_other_stages_read_is_refused() -> None:
    model, x = CachedForEvaluation("cache"), torch.randn(8, 8)
    pm = partition(model, 4, {"pipeline": 2, "fsdp": 2}, example_inputs=(x,))
    with pytest.raises(ConfigError, match="the call writes cache on one stage, and ranks of another one read copies"):
        pm.eval()(x)


@pytest.mark.parametrize(
    ("is_trained", "mode"),
    [
        (False, {"pipeline": 2}),
        (True, {"pipeline": 2}),
        *(
            pytest.param(trained, {"pipeline": 2, other: 2}, marks=pytest.mark.slow)
            for trained in (False, True)
            for other in ("fsdp", "tensor")
        ),
    ],
)
def test_evaluation_reads_buffers_of_other_stages(is_trained: bool, mode: dict[str, int]) -> None:
    """In one process there is one tensor, which training, checkpoints and writes of the caller change for all stages."""
    model, x = ScaledForEvaluation(is_trained), torch.randn(8, 8)
    pm = partition(model, 2 ** len(mode), mode, example_inputs=(x,))

    def assert_equal(*partitioned: nn.Module) -> None:
        for each in partitioned:
            torch.testing.assert_close(each.eval()(x), model.eval()(x))
            each.train()
        model.train()

    assert_equal(pm)
    torch.testing.assert_close(pm(x), model(x))
    copied = copy.deepcopy(pm)
    assert_equal(pm, copied)
    values = {name: value + 1 for name, value in model.state_dict().items()}
    for each in (model, pm, copied):
        each.load_state_dict(values)
    assert_equal(pm, copied)
    for each in (model, pm):
        each.get_buffer("scale").fill_(3.0)
    assert_equal(pm)


@pytest.mark.parametrize(
    ("name", "devices", "mode", "options"),
    [
        ("unread_norm", 2, "data", {}),
        pytest.param("passed_averages", 2, "data", {}, marks=pytest.mark.slow),
        pytest.param("passed_averages", 2, "model", {}, marks=pytest.mark.slow),
        pytest.param("cache", 2, "data", {}, marks=pytest.mark.slow),
        pytest.param("cache", 2, "fsdp", {}, marks=pytest.mark.slow),
        pytest.param("average", 2, "tensor", {}, marks=pytest.mark.slow),
        ("average", 2, "pipeline", {"n_microbatches": 4}),
        pytest.param("assigned", 2, "pipeline", {"n_microbatches": 3, "schedule": "GPipe"}, marks=pytest.mark.slow),
        pytest.param("sum", 2, "data", {}, marks=pytest.mark.slow),
        ("count", 3, {"pipeline": (2, 1)}, {"n_microbatches": 4, "recompute": "full"}),
        pytest.param("maximum", 2, "data", {}, marks=pytest.mark.slow),
        pytest.param("spectral_norm", 2, "pipeline", {"n_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param("spectral_norm_parametrization", 2, "pipeline", {"n_microbatches": 2, "schedule": "ZB1P"}, marks=pytest.mark.slow),
    ],
)
def test_buffers_are_what_the_model_makes_them(name: str, devices: int, mode: Any, options: dict[str, Any]) -> None:
    assert_trains_as_original(model(name), devices, mode, **options)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(("unread images", "means"), marks=pytest.mark.slow),
        pytest.param(("means", "unread images"), marks=pytest.mark.slow),
        ("images", "unread means"),
        pytest.param(("unread images", "means", "unread images"), marks=pytest.mark.slow),
        pytest.param(("unread means", "images", "unread means"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("devices", "mode"), [(2, "tile"), pytest.param(1, {"tile": 2}, marks=pytest.mark.slow)])
def test_calls_of_one_normalisation_update_it_in_turn(calls: tuple[str, ...], devices: int, mode: Any) -> None:
    """Tiles write out the updates of some calls; the others are left to the operation."""
    torch.manual_seed(0)
    assert_trains_as_original(SharedNorm(*calls), devices, mode)


@pytest.mark.slow
def test_calls_of_one_normalisation_without_weights() -> None:
    torch.manual_seed(0)
    assert_trains_as_original(SharedNorm("unread images", "means", affine=False), 2, "tile")


@pytest.mark.parametrize("name", ["average_read", "cache", "maximum", "passed_averages", "sum"])
def test_a_buffer_that_no_combination_of_microbatches_gives_is_refused_by_name(name: str) -> None:
    error = refusal(model(name), 2, "pipeline", n_microbatches=2)
    assert isinstance(error, ConfigError)
    assert "cannot be cut into 2 microbatches" in error.problem
    if name != "average_read":
        assert f"the new value of buffer {'mean' if name == 'passed_averages' else 'n'}" in error.problem
    assert "n_microbatches=1" in str(error.remedy)


def test_what_becomes_of_a_buffer_over_microbatches_is_known() -> None:
    def updates(name: str) -> dict[str, str]:
        traced = model(name).double()
        return dict(trace(traced, (example(traced),)).updates)

    assert updates("average") == {"b_n": "mean"}
    assert updates("count") == {"b_count": "same"}
    assert updates("maximum") == {"b_n": "mixed"}
    assert set(updates("spectral_norm").values()) == {"same"}


def test_steps_are_counted_once_a_call() -> None:
    """The one buffer of batch normalisation that does not depend on rows."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    with pytest.warns(PartitionWarning):
        pm = partition(net, 2, "pipeline", example_inputs=(torch.zeros(8, 8),), n_microbatches=4)
    for _ in range(2):
        pm.train_step(torch.randn(8, 8), target=torch.zeros(8, 8), loss_fn=nn.functional.mse_loss)
    assert pm.full_state_dict()["1.num_batches_tracked"] == 2


def test_evaluation_writes_no_buffer() -> None:
    for name in ("unread_norm", "spectral_norm"):
        net = model(name).double().eval()
        pm = partition(net, 2, "pipeline", example_inputs=(example(net),), n_microbatches=2)
        pm(example(net))
        for key, value in net.named_buffers():
            torch.testing.assert_close(pm.full_state_dict()[key], value, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_every_mode_leaves_the_buffers_of_the_model_or_refuses(name: str, recompute: str) -> None:
    for devices, mode, options in MODES:
        microbatched = options.get("n_microbatches", 1) > 1
        if "tile" in str(mode) or (name == "unread_norm" and microbatched):
            continue
        error = refusal(model(name), devices, mode, recompute=recompute, **options)
        if error is not None:
            assert isinstance(error, PartitionError)
            assert microbatched, error
