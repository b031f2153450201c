"""Tiles in turn on one device: the numbers of the whole model, less memory, and what was predicted of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.live_memory import forward_peak
from partitioner import ConfigError, Plan, partition
from partitioner.tracing.trace import trace
from passes.axes import find_axes
from passes.ir.errors import InfeasiblePlanError
from passes.streaming.keeping import stream_size
from passes.streaming.streamed import grid_over, streamed

IMAGE = torch.randn(2, 3, 24, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Level(nn.Module):
    """Convolutions with the two normalisations that an image model has."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first, self.batch = nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out)
        self.second, self.group = nn.Conv2d(channels_out, channels_out, 3, padding=2, dilation=2), nn.GroupNorm(2, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.group(self.second(F.relu(self.batch(self.first(x))))))


class SkipNet(nn.Module):
    """A small U-Net: a skip at full size, transposed windows, a border that is reflected, a gate of all of space."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = Level(3, 4), Level(4, 8), nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
        self.gate, self.last = nn.Linear(4, 4), nn.Conv2d(8, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        full = self.down(x)
        up = self.up(self.deep(F.max_pool2d(full, 2)))
        gate = torch.sigmoid(self.gate(full.mean((2, 3))))[:, :, None, None]
        padded = F.pad(torch.cat([full * gate, up], 1), (1, 1, 1, 1), mode="reflect")
        return torch.as_tensor(self.last(padded))


def resampled() -> nn.Module:
    """Interpolation by factors that are whole and that are not, averages that count, instances."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True),
        nn.Upsample(scale_factor=1.5, mode="bilinear"),
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.AdaptiveAvgPool2d((11, 7)),
    )


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[union-attr]
    return model.eval()


def sizes_of(model: nn.Module) -> list[int]:
    """Bytes of the values of a model: the budgets that make a difference."""
    graph = trace(model, (IMAGE,), None, False)
    found = {int(node.meta["val"].nelement() * 8) for node in graph.computing_nodes() if isinstance(node.meta["val"], Tensor)}
    return sorted(found)


@pytest.mark.parametrize("build", [SkipNet, resampled])
@pytest.mark.parametrize("tiles", [(3,), (2, 3)])
def test_any_budget_gives_the_same_numbers(build: Callable[[], nn.Module], tiles: tuple[int, ...]) -> None:
    model = made(build)
    graph = trace(model, (IMAGE,), None, False)
    expected = model(IMAGE)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for budget in (0, sizes_of(model)[-1] // 4, sizes_of(model)[-1]):
        found = streamed(graph, tiles, budget)
        names = {**found.parameters, **found.buffers}
        given = [node.name for node in found.graph.nodes if node.op == "placeholder"]
        values = {"batch": len(IMAGE), **{name: state[original] for name, original in names.items()}, **found.constants}
        with torch.no_grad():
            (result,) = found.module(*(values.get(name, IMAGE) for name in given))
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_the_call() -> None:
    model = made(SkipNet)
    whole = forward_peak(trace(model, (IMAGE,), None, False))
    pm = partition(model, devices=1, mode={"tile": 4}, example_inputs=(IMAGE,), progress=False)
    torch.testing.assert_close(pm(IMAGE), model(IMAGE), rtol=0, atol=1e-12)
    torch.testing.assert_close(pm(IMAGE[:1]), model(IMAGE[:1]), rtol=0, atol=1e-12)
    assert pm.plan.tiles == (2, 2)
    assert pm.plan.memory[0] < whole
    assert pm.simulate().peak_memory[0] == pytest.approx(pm.plan.memory[0], rel=0.01)
    assert Plan.from_json(pm.plan.to_json()) == pm.plan
    pm.verify()


def test_a_plan_is_lowered_again() -> None:
    model = made(SkipNet)
    pm = partition(model, devices=1, mode={"tile": (2, 2)}, example_inputs=(IMAGE,), progress=False)
    again = partition(model, devices=1, plan=pm.plan, example_inputs=(IMAGE,), progress=False)
    assert again.graph(0).code == pm.graph(0).code


def test_a_smaller_budget_holds_less_and_computes_more() -> None:
    """The estimate by boxes orders budgets as the graphs do."""
    model = made(SkipNet)
    graph = trace(model, (IMAGE,), None, False)
    axes = find_axes(graph.graph)
    largest = sizes_of(model)[-1]
    estimates = [stream_size(graph, axes, grid_over(axes, (3, 2)), budget) for budget in (largest, largest // 3)]
    peaks = [forward_peak(streamed(graph, (3, 2), budget)) for budget in (largest, largest // 3)]
    assert estimates[1].peak < estimates[0].peak
    assert peaks[1] < peaks[0]
    assert estimates[1].calls > estimates[0].calls


def test_what_has_no_gradient_says_so() -> None:
    model = made(SkipNet)
    pm = partition(model, devices=1, mode={"tile": 4}, example_inputs=(IMAGE,), progress=False)
    with pytest.raises(ConfigError, match="no gradients"):
        pm(IMAGE.clone().requires_grad_())
    with pytest.raises(ConfigError, match="no gradients"):
        pm.train_step(IMAGE, target=IMAGE[:, :2], loss_fn=F.mse_loss)
    with pytest.raises(ConfigError, match="training mode"):
        partition(model.train(), devices=1, mode={"tile": 4}, example_inputs=(IMAGE,), progress=False)


def test_a_limit_that_no_tiles_keep() -> None:
    with pytest.raises(InfeasiblePlanError, match="more than the limit"):
        partition(made(SkipNet), devices=1, mode={"tile": 4}, example_inputs=(IMAGE,), memory_limit=40_000, progress=False)


@pytest.mark.parametrize(
    ("mode", "words"),
    [({"tile": 4, "data": 2}, "more than one device"), ({"tile": (2, 2, 2)}, "has 3 dimensions, the space of this model has 2")],
)
def test_what_one_device_cannot(mode: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        partition(made(SkipNet), devices=1, mode=mode, example_inputs=(IMAGE,), progress=False)
