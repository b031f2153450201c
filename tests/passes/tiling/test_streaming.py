"""Sequential tiles on one device: the numbers of the whole model, less memory, and what was predicted of it."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.live_storages import peak_of
from cost_models.memory.liveness import forward_peak, given_bytes
from partitioner import ConfigError, Plan, partition
from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.ir.errors import InfeasiblePlanError
from passes.ir.graph import ModelGraph
from passes.tiling.peak_memory import stream_size
from passes.tiling.rewrite import grid_over, tiled_graph
from tests.cost_models.simulator.test_simulated_memory import measured
from tests.support.running.slow_values import slow
from tests.support.samples.turned_space import Gram, Lines, Turned

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


class Block(nn.Module):
    """Little to differentiate: a window, statistics of the batch, a sum over space, a random mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, stride=2)
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        gate = F.dropout(self.gate(x.mean((2, 3))), 0.5, self.training)
        return torch.as_tensor(self.last(x * gate[:, :, None, None]))


class StridedAttention(nn.Module):
    """Every second position of the input attends to all of these; then an LSTM that drops states, over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        every_second = x[:, ::2]
        value = every_second[:, None]
        attended = F.scaled_dot_product_attention(self.query(every_second)[:, None], value, value)[:, 0]
        return torch.as_tensor(self.lstm(attended)[0])


class ReducedAndReturned(nn.Module):
    """A value that is returned, and of which a layer reduces the tiled axis: the layer needs no tiles, since the value is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(11, 8, 2, stride=3, padding=2)
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y, self.layers(y)


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
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_()
    return model.eval()


def sizes_of(model: nn.Module) -> list[int]:
    """Return bytes of the values of a model: the budgets that make a difference."""
    graph = trace(model, (IMAGE,), None, False)
    found = {int(node.meta["val"].nelement() * 8) for node in graph.computing_nodes() if isinstance(node.meta["val"], Tensor)}
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "tiles"),
    [
        (SkipNet, (3,)),
        (resampled, (2, 3)),
        (SkipNet, (2, 3)),
        (resampled, (3,)),
    ],
)
def test_any_budget_gives_the_same_numbers(build: Callable[[], nn.Module], tiles: tuple[int, ...]) -> None:
    model = made(build)
    graph = trace(model, (IMAGE,), None, False)
    expected = model(IMAGE)
    for budget in (0, sizes_of(model)[-1] // 4, sizes_of(model)[-1]):
        torch.testing.assert_close(computed(tiled_graph(graph, tiles, budget), model, IMAGE), expected, rtol=0, atol=1e-12)


def computed(graph: ModelGraph, model: nn.Module, x: Tensor) -> Tensor:
    """Return the result of a model's graph."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {**graph.parameters, **graph.buffers}
    given = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    values = {"batch": len(x), **{name: state[original] for name, original in names.items()}, **graph.constants}
    with torch.no_grad():
        (result,) = graph.module(*(values.get(name, x) for name in given))
    return torch.as_tensor(result)


def test_rows_within_an_axis_of_space() -> None:
    """A dimension that holds space outside and rows of the batch inside is computed whole: its tiles have no fixed number of elements."""
    model, x = made(lambda: Lines(nn.Linear(18, 18))), torch.randn(4, 3, 9, 6, dtype=torch.float64)
    found = tiled_graph(trace(model, (x,), None, False), (2,), 0)
    torch.testing.assert_close(computed(found, model, x), model(x), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_call() -> None:
    model = made(Block)
    whole = forward_peak(trace(model, (IMAGE,), None, False))
    pm = partition(model, devices=1, mode={"tile": 4}, example_inputs=(IMAGE,), progress=False)
    torch.testing.assert_close(pm(IMAGE), model(IMAGE), rtol=0, atol=1e-12)
    torch.testing.assert_close(pm(IMAGE[:1]), model(IMAGE[:1]), rtol=0, atol=1e-12)
    assert pm.plan.tiles == (2, 2)
    assert pm.plan.memory[0] < whole
    assert pm.simulate().peak_memory[0] == pytest.approx(pm.plan.memory[0], rel=0.01)
    assert Plan.from_json(pm.plan.to_json()) == pm.plan
    pm.verify()


@pytest.mark.slow
def test_a_plan_is_lowered_again() -> None:
    model = made(Block)
    pm = partition(model, devices=1, mode={"tile": (2, 2)}, example_inputs=(IMAGE,), progress=False)
    again = partition(model, devices=1, plan=pm.plan, example_inputs=(IMAGE,), progress=False)
    assert again.graph(0).code == pm.graph(0).code


@pytest.mark.slow
def test_a_smaller_budget_holds_less_and_computes_more() -> None:
    """The estimate by boxes orders budgets as the graphs do."""
    model = made(SkipNet)
    graph = trace(model, (IMAGE,), None, False)
    axes = find_axes(graph.graph)
    largest = sizes_of(model)[-1]
    estimates = [stream_size(graph, axes, grid_over(axes, (3, 2)), budget) for budget in (largest, largest // 3)]
    peaks = [forward_peak(tiled_graph(graph, (3, 2), budget)) for budget in (largest, largest // 3)]
    assert estimates[1].peak < estimates[0].peak
    assert peaks[1] < peaks[0]
    assert estimates[1].calls > estimates[0].calls


def trained_alike(model: nn.Module, pm: nn.Module, x: Tensor) -> None:
    """Compare one step of both, and a forward and backward of both: loss, gradients of parameters and input, stored statistics."""
    expected, mine = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(1)
    result = expected(mine)
    target = torch.ones_like(result)
    loss = F.mse_loss(result, target)
    loss.backward()
    torch.manual_seed(1)
    torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=F.mse_loss), loss.detach(), rtol=0, atol=1e-12)  # type: ignore[operator]
    assert_gradients(pm, expected)
    for name, buffer in pm.full_state_dict().items():  # type: ignore[operator]
        torch.testing.assert_close(buffer, expected.state_dict()[name], rtol=0, atol=1e-12, msg=name)
    pm.zero_grad()
    theirs = x.clone().requires_grad_()
    torch.manual_seed(1)
    F.mse_loss(pm(theirs), target).backward()
    assert_gradients(pm, expected)
    torch.testing.assert_close(theirs.grad, mine.grad, rtol=0, atol=1e-12)


def assert_gradients(pm: nn.Module, expected: nn.Module) -> None:
    found = pm.full_gradients()  # type: ignore[operator]
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("training", [*slow(True), False])
def test_trains(training: bool) -> None:
    model = made(Block).train(training)
    pm = partition(model, devices=1, mode={"tile": (2, 1)}, example_inputs=(IMAGE,), progress=False)
    trained_alike(model, pm, IMAGE)
    assert re.search(r"tiles +2 x 1, sequential", pm.explain())


class WithoutParameters(nn.Module):
    """Filters an image by a buffer, or pools it, and counts its steps if it has a buffer."""

    steps: Tensor

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.has_buffers = has_buffers
        if has_buffers:
            self.register_buffer("filter", torch.rand(3, 3, 3, 3))
            self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.has_buffers:
            if self.training:
                self.steps.add_(1)
            x = F.conv2d(x, self.get_buffer("filter"), padding=1)
        return F.avg_pool2d(F.lp_pool2d(x.abs() + 2.5, 2.0, 2), 3, 1, 1).sin()


@pytest.mark.parametrize(
    ("has_buffers", "training"),
    [(True, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((True, False), (False, True), (False, False)))],
)
def test_a_model_without_parameters(has_buffers: bool, training: bool) -> None:
    model = WithoutParameters(has_buffers).double().train(training)
    pm = partition(model, devices=1, mode={"tile": 2}, example_inputs=(IMAGE,), progress=False)
    trained_alike(model, pm, IMAGE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "dims"),
    [
        pytest.param(lambda: nn.BatchNorm2d(9), (0, 2, 3, 1), id="batch_norm"),
        pytest.param(lambda: nn.BatchNorm2d(9, track_running_stats=False), (0, 2, 1, 3), id="batch_norm_without_buffers"),
        pytest.param(lambda: nn.BatchNorm2d(3), (2, 1, 0, 3), id="batch_norm_of_rows"),
        pytest.param(lambda: nn.GroupNorm(1, 9), (0, 2, 1, 3), id="one_group"),
        pytest.param(lambda: nn.GroupNorm(9, 9), (0, 2, 3, 1), id="groups_of_one_channel"),
        pytest.param(lambda: nn.GroupNorm(3, 3), (2, 1, 0, 3), id="groups_of_rows"),
        pytest.param(lambda: nn.InstanceNorm2d(9, affine=True), (0, 2, 1, 3), id="instance_norm"),
    ],
)
def test_normalisations_of_which_space_is_the_channels_or_the_rows(build: Callable[[], nn.Module], dims: tuple[int, ...]) -> None:
    model, x = made(lambda: Turned(build(), dims)).train(), IMAGE[..., :9, :6].clone()
    plan = partition(model, devices=1, mode={"tile": (2, 2)}, example_inputs=(x,), progress=False).plan
    plan = dataclasses.replace(plan, tile_budget=0, weights="")
    trained_alike(model, partition(model, devices=1, plan=plan, example_inputs=(x,), progress=False), x)


@pytest.mark.slow
def test_statistics_of_values_of_16_bits_are_of_32() -> None:
    """As the kernels compute them; the normalized tile has 16 bits, which the next layer wants."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3, padding=1))
    x = torch.randn(2, 2, 8, 8)
    pm = partition(model, devices=1, mode={"tile": 4}, example_inputs=(x,), precision="bf16-mixed", progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    torch.testing.assert_close(pm(x), expected, rtol=2e-2, atol=2e-2)


def test_one_axis_that_is_height_and_width() -> None:
    """Tiles cut it along one of the two: no dimension of a value is cut by both."""
    model, x = made(Gram).train(), torch.randn(4, 3, 11, 9, dtype=torch.float64)
    plan = partition(model, devices=1, mode={"tile": (2, 2)}, example_inputs=(x,), progress=False).plan
    plan = dataclasses.replace(plan, tile_budget=0, weights="")
    trained_alike(model, partition(model, devices=1, plan=plan, example_inputs=(x,), progress=False), x)


@pytest.mark.slow
def test_slices_of_the_model_that_have_steps() -> None:
    """A slice of the model is computed in its tile; only slices that tiles are cut by are pieces of a whole value."""
    model = made(StridedAttention).train()
    x = torch.randn(3, 11, 4, dtype=torch.float64)
    pm = partition(model, devices=1, mode={"tile": 2}, example_inputs=(x,), progress=False)
    pm.verify()
    trained_alike(model, pm, x)


@pytest.mark.parametrize("budget", [*slow(0), 1000, *slow(1536, 1920, 4000)])
def test_a_value_that_is_returned_and_reduced(budget: int) -> None:
    model, x = made(ReducedAndReturned).train(), torch.randn(6, 11, 12, dtype=torch.float64)
    plan = partition(model, devices=1, mode={"tile": 2}, example_inputs=(x,), progress=False).plan
    pm = partition(model, devices=1, plan=dataclasses.replace(plan, tile_budget=budget, weights=""), example_inputs=(x,), progress=False)
    graph = trace(model, (x,))
    axes = find_axes(graph.graph)
    assert stream_size(graph, axes, grid_over(axes, (2,)), budget).peak > 0
    torch.testing.assert_close(pm(x), model(x), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("build", [SkipNet, resampled])
@pytest.mark.parametrize(("tiles", "share", "recompute"), [((3,), 0.0, "none"), ((2, 3), 0.25, "full"), ((2, 2), 0.5, "none")])
def test_trains_with_any_budget(build: Callable[[], nn.Module], tiles: tuple[int, ...], share: float, recompute: str) -> None:
    model = made(build).train()
    plan = partition(
        made(Block).train(), devices=1, mode={"tile": tiles}, example_inputs=(IMAGE,), recompute=recompute, progress=False
    ).plan
    plan = dataclasses.replace(plan, tile_budget=int(share * sizes_of(model)[-1]), weights="")
    trained_alike(model, partition(model, devices=1, plan=plan, example_inputs=(IMAGE,), progress=False), IMAGE)


@pytest.mark.slow
@pytest.mark.parametrize("build", [SkipNet, resampled])
def test_a_forward_holds_no_more_than_was_predicted(build: Callable[[], nn.Module]) -> None:
    """Beyond parameters and the input, which are there already."""
    model = made(build)
    x = torch.randn(1, 3, 48, 40, dtype=torch.float64)
    graph = trace(model, (x,), None, False)
    given = given_bytes(graph)
    pm = partition(model, devices=1, mode={"tile": 6}, example_inputs=(x,), progress=False)
    with torch.no_grad():
        pm(x)
        peak = peak_of(lambda: pm(x))
    assert 0.95 * (pm.plan.memory[0] - given) <= peak <= pm.plan.memory[0] - given
    assert peak < (forward_peak(graph) - given) * 2 / 3


@pytest.mark.slow
def test_a_step_holds_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every storage that a run makes, for as long as it is there."""
    model = made(Block).train()
    x = torch.randn(1, 3, 48, 40, dtype=torch.float64)
    whole = partition(model, devices=1, mode="model", example_inputs=(x,), optimizer="none", progress=False)
    tiles = partition(model, devices=1, mode={"tile": 6}, example_inputs=(x,), optimizer="none", progress=False)
    target = torch.ones_like(model(x))
    given = sum(tensor.nbytes for tensor in (x, *model.parameters(), *model.buffers()))
    peaks = []
    for pm in (whole, tiles):

        def step(pm: nn.Module = pm) -> None:
            pm.zero_grad()
            pm.train_step(x, target=target, loss_fn=F.mse_loss)  # type: ignore[operator]

        step()
        peaks.append(measured(step, monkeypatch)[0] + given)
        assert pm.simulate().peak_memory[0] == pytest.approx(peaks[-1], rel=0.02)
    assert tiles.plan.memory[0] == pytest.approx(peaks[1], rel=0.02)
    assert peaks[1] < peaks[0] / 2


class DropsTwice(nn.Module):
    """The second mask has the order of memory of a window over channels-last memory, which tiles fill in rows."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.dropout(x, 0.3), 2, dilation=2)
        return F.dropout(x.transpose(2, 1).contiguous(), 0.5)


@pytest.mark.parametrize("width", [4, 7])
def test_draws_of_values_that_tiles_lay_out_anew(width: int) -> None:
    model = DropsTwice()
    x = torch.randn(12, 6, 6, width, dtype=torch.float64).to(memory_format=torch.channels_last)
    pm = partition(model, devices=1, mode={"tile": 3}, example_inputs=(x,), progress=False)
    results = []
    for module in (model, pm):
        torch.manual_seed(0)
        results.append(module(x))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_halves_of_a_backward_are_refused() -> None:
    with pytest.raises(ConfigError, match="schedule='ZB1P' does not fit"):
        partition(made(Block), devices=1, mode={"tile": 4}, example_inputs=(IMAGE,), schedule="ZB1P", progress=False)


@pytest.mark.slow
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
