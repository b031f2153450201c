"""A wide halo fetched once, its overlap computed on both sides: the numbers of the whole model, fewer messages, chosen by price."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.hardware.clusters import Cluster, Device, Link
from partitioner import ConfigError, Constraints, PartitionedModel, Plan, partition
from passes.ir.comm.halo_strategy import HaloSegment
from passes.ir.comm.primitives import halo_add, halo_exchange, wait
from tests.support.models.case import Case
from tests.support.models.vision.space import SPACE
from tests.support.running.tiles import first_difference_of_tiles
from tests.support.samples.tile_operations import OPERATIONS, drawn
from tests.support.samples.turned_space import Lines, Turned

ONCE, ALWAYS, MEANWHILE = (Constraints(halo=strategy) for strategy in ("recompute", "exchange", "overlap"))
Grid = int | tuple[int, ...]


def ranks(grid: Grid) -> int:
    return grid if isinstance(grid, int) else math.prod(grid)


# -- the same numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if (name, seed) == ("crop", 0) else (pytest.mark.slow,))
        for name in OPERATIONS
        for seed in range(2)
    ],
)
def test_operations(name: str, seed: int) -> None:
    """Every windowed operation after a convolution that is computed again."""
    model, x, grid = drawn(name, seed)
    assert (
        first_difference_of_tiles(
            nn.Sequential(nn.Conv2d(2, 2, 1).double() if x.dim() == 4 else nn.Identity(), model),
            x,
            ranks(grid),
            {"tile": grid},
            constraints=ONCE,
        )
        == ""
    )


class TwoReaders(nn.Module):
    """Reads rows that are computed beyond a rank's own by a dilated window, which ends before the last row, and by elements."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what both read."""
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        return F.max_pool2d(x, 2, dilation=2).sum((2, 3)) + x.sin().sum((2, 3))


def test_ranks_that_compute_different_numbers_of_rows_from_equal_parts() -> None:
    x = torch.randn(2, 3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert first_difference_of_tiles(TwoReaders(), x, 2, {"tile": 2}, constraints=ONCE) == ""


class Residual(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of its input."""
        result: Tensor = x + self.second(F.silu(self.first(x)))
        return result


def drawn_chain(seed: int) -> tuple[nn.Module, Tensor, Grid]:
    """Return layers with windows of every kind after statistics over space, which are not recomputed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)

    def convolution() -> nn.Module:
        kernel, dilation = rng.choice([2, 3, 5]), rng.choice([1, 1, 2])
        padding = rng.randint(0, dilation * (kernel - 1))
        return nn.Conv2d(2, 2, kernel, rng.choice([1, 1, 2]), padding, dilation, padding_mode=rng.choice(["zeros", "zeros", "replicate"]))

    def kept() -> nn.Module:
        return Residual(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 5, padding=4, dilation=2))

    def stored() -> nn.Module:
        norm = nn.BatchNorm2d(2).eval()
        norm.running_mean, norm.running_var = torch.randn(2), torch.rand(2) + 0.5
        return norm

    kinds: list[Callable[[], nn.Module]] = [
        convolution,
        convolution,
        kept,
        lambda: nn.MaxPool2d(rng.choice([2, 3]), 2, 1, ceil_mode=rng.random() < 0.5),
        lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=rng.random() < 0.5),
        lambda: nn.ConvTranspose2d(2, 2, rng.choice([2, 3, 4]), 2, rng.choice([0, 1]), bias=True),
        lambda: nn.Upsample(scale_factor=rng.choice([2, 1.5]), mode=rng.choice(["nearest", "bilinear", "bicubic"])),
        lambda: nn.ReflectionPad2d(rng.randint(0, 2)),
        lambda: nn.GroupNorm(1, 2),
        nn.GELU,
        stored,
    ]
    for _ in range(100):
        layers = [nn.Conv2d(2, 2, 1), nn.GroupNorm(1, 2), *(rng.choice(kinds)() for _ in range(rng.randint(3, 6)))]
        grids: list[Grid] = [2, 3, 4, (2, 2), (1, 2), (3, 2)]
        model, grid = nn.Sequential(*layers).double(), rng.choice(grids)
        x = torch.randn(2, 2, rng.randint(12, 22), rng.randint(12, 18), dtype=torch.float64)
        try:
            if min(model(x).shape[2:]) >= 4:
                return model, x, grid
        except RuntimeError:
            continue  # a window does not fit
    raise AssertionError("no chain fits its input")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in (19, 33) else (pytest.mark.slow,)) for seed in (*range(8), 19, 33)]
)
def test_chains_in_pieces(seed: int) -> None:
    """The interior of every layer apart from its borders. In the 33rd, ranks have parts of one size and different borders."""
    model, x, grid = drawn_chain(seed)
    assert first_difference_of_tiles(model, x, ranks(grid), {"tile": grid}, constraints=MEANWHILE) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed == 1 else (pytest.mark.slow,)) for seed in range(8)])
def test_chains(seed: int) -> None:
    """Results, gradients of inputs and of parameters, in float64."""
    model, x, grid = drawn_chain(seed)
    assert first_difference_of_tiles(model, x, ranks(grid), {"tile": grid}, constraints=ONCE) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "grid", "training"),
    [
        pytest.param(case, grid, training, id=f"{case.name}-{grid}-{'training' if training else 'evaluation'}")
        for place, case in enumerate(SPACE)
        for grid, training in ((3, place % 2 == 0), ((2, 2), place % 2 == 1))
    ],
)
def test_models(case: Case, grid: Grid, *, training: bool) -> None:
    """Every model in both grids, in training and in evaluation; every second one of these four."""
    instance = case.build(batch_size=2)
    model = instance.model.train(training)
    assert first_difference_of_tiles(model, instance.args[0], ranks(grid), {"tile": grid}, constraints=ONCE) == ""


@pytest.mark.slow
@pytest.mark.parametrize("constraints", [None, ONCE], ids=["exchange", "recompute"])
def test_rows_within_an_axis_of_space(constraints: Constraints | None) -> None:
    """Of a dimension that holds space outside and rows of the batch inside, no rank computes more than its own part."""
    torch.manual_seed(0)
    model, x = Lines(nn.Sequential(nn.Linear(18, 18), nn.Tanh())).double(), torch.randn(4, 3, 9, 6, dtype=torch.float64)
    assert first_difference_of_tiles(model, x, 2, {"tile": 2}, constraints=constraints) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(nn.BatchNorm2d(9), id="batch_norm"),
        pytest.param(nn.GroupNorm(3, 9), id="group_norm"),
        pytest.param(nn.Conv2d(9, 9, 3, padding=1, groups=3), id="grouped_convolution"),
        pytest.param(nn.InstanceNorm2d(9, affine=True), id="instance_norm"),
        pytest.param(nn.BatchNorm2d(9, track_running_stats=False), id="batch_norm_without_buffers"),
        pytest.param(nn.LayerNorm((9, 3, 6)), id="layer_norm"),
    ],
)
def test_layers_of_which_space_is_the_channels(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = Turned(layer, (0, 2, 1, 3)).double(), torch.randn(4, 3, 9, 6, dtype=torch.float64)
    assert first_difference_of_tiles(model, x, 4, {"tile": (2, 2)}, constraints=ONCE) == ""


MESHES: tuple[dict[str, Grid], ...] = ({"data": 2, "tile": 2}, {"tile": 2, "tensor": 2}, {"fsdp": 2, "tile": (2, 1)})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_beside_other_dimensions(mesh: dict[str, Grid]) -> None:
    model = stack(norm=True)
    x = torch.randn(4, 3, 16, 12, dtype=torch.float64)
    assert first_difference_of_tiles(model, x, math.prod(map(ranks, mesh.values())), mesh, constraints=ONCE) == ""


@pytest.mark.slow
def test_a_run_in_two_stages() -> None:
    """Values that a stage sends contain the overlap, too."""
    torch.manual_seed(0)
    model, x = stack(norm=True), torch.randn(4, 3, 16, 12, dtype=torch.float64)
    pm = partition(
        model,
        4,
        {"pipeline": 2, "tile": 2},
        example_inputs=(x,),
        progress=False,
        schedule="1F1B",
        n_microbatches=2,
        constraints=Constraints(halo="recompute", split_spec={"4": "beginning"}),
    )
    assert len(pm.plan.stages) == 2
    target = torch.randn(4, 4, 16, 12, dtype=torch.float64)
    loss = pm.train_step(x, target=target, loss_fn=F.mse_loss)
    expected = F.mse_loss(model(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def test_rows_at_seams_are_equal_bit_by_bit() -> None:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)]
    model, x = nn.Sequential(*layers), torch.randn(2, 3, 64, 48)
    pm = partition(model, 4, {"tile": (2, 2)}, example_inputs=(x,), progress=False, constraints=ONCE)
    with torch.no_grad():
        expected, found = model(x), pm(x)
    assert torch.equal(found[:, :, 14:18], expected[:, :, 14:18])
    assert torch.equal(found[..., 10:14], expected[..., 10:14])


@pytest.mark.slow
def test_statistics_count_no_row_twice() -> None:
    """Normalisation by the batch in training stands between runs; its stored statistics are those of the whole model."""
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 2, 3),
    ]
    model, x = nn.Sequential(*layers).double(), torch.randn(2, 3, 16, 12, dtype=torch.float64)
    assert first_difference_of_tiles(model, x, 4, {"tile": (2, 2)}, constraints=ONCE) == ""


@pytest.mark.slow
def test_checked_side_by_side() -> None:
    model, x = stack(norm=True), torch.randn(2, 3, 16, 12, dtype=torch.float64)
    assert pm_of(model, x, 2, ONCE).check(x)


# -- messages ----------------------------------------------------------------------------------------------------------------------


def stack(*, norm: bool) -> nn.Sequential:
    """Four convolutions of 3 x 3, the first of the image; before the others perhaps statistics over space."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4) if norm else nn.Identity()]
    layers += [layer for _ in range(3) for layer in (nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))]
    return nn.Sequential(*layers).double()


def pm_of(model: nn.Module, x: Tensor, grid: Grid, constraints: Constraints | None, cluster: Cluster | None = None) -> PartitionedModel:
    return partition(model, ranks(grid), {"tile": grid}, example_inputs=(x,), progress=False, constraints=constraints, cluster=cluster)


def messages(pm: PartitionedModel) -> tuple[int, int]:
    """Return the numbers of halo exchanges, and of their gradients, in the step of a rank."""
    nodes = [node.target for node in pm.graph(0).graph.nodes]
    return nodes.count(halo_exchange), nodes.count(halo_add)


@pytest.mark.parametrize(
    ("norm", "constraints", "expected"),
    [
        pytest.param(True, ALWAYS, 3, marks=pytest.mark.slow),
        pytest.param(True, ONCE, 1, marks=pytest.mark.slow),
        (False, ONCE, 0),  # every rank cuts what it needs from the image
        pytest.param(True, Constraints(halo={"": "recompute", "5": "exchange"}), 2, marks=pytest.mark.slow),
        pytest.param(
            True, Constraints(halo={"": "exchange", "5": "recompute", "4": "recompute", "3": "recompute"}), 2, marks=pytest.mark.slow
        ),
    ],
)
def test_messages(norm: bool, constraints: Constraints, expected: int) -> None:
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    pm = pm_of(stack(norm=norm), x, (2, 1), constraints)
    pm.train_step(x, target=torch.randn(2, 4, 16, 12, dtype=torch.float64), loss_fn=F.mse_loss)
    assert messages(pm) == (expected, expected)
    chosen = [run for run in pm.plan.halos if run.strategy == "recompute"]
    assert sum(run.exchange_messages - run.recompute_messages for run in chosen) == 3 - expected


@pytest.mark.slow
def test_the_interior_is_computed_between_start_and_wait() -> None:
    """Forward and backward; what is left are the borders, of one row each, which read three."""
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    pm = pm_of(stack(norm=True), x, (2, 1), MEANWHILE)
    pm.train_step(x, target=torch.randn(2, 4, 16, 12, dtype=torch.float64), loss_fn=F.mse_loss)
    assert messages(pm) == (3, 3)
    nodes = list(pm.graph(0).graph.nodes)
    convolutions = (torch.ops.aten.conv2d.default, torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
    for start in (node for node in nodes if node.target in (halo_exchange, halo_add)):
        (waited,) = (user for user in start.users if user.target is wait)
        between = nodes[nodes.index(start) : nodes.index(waited)]
        assert [node.args[0].meta["val"].shape[2] for node in between if node.target in convolutions] == [
            8 if start.target is halo_exchange else 6
        ]


@pytest.mark.slow
def test_rows_that_move_are_those_of_the_composed_windows() -> None:
    """Three convolutions of 3 x 3 need three rows of the neighbour."""
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    pm = pm_of(stack(norm=True), x, (2, 1), ONCE)
    pm.train_step(x, target=torch.randn(2, 4, 16, 12, dtype=torch.float64), loss_fn=F.mse_loss)
    (fetched,) = [node for node in pm.graph(0).graph.nodes if node.target is halo_exchange]
    assert fetched.kwargs["wanted"] == ("0:11|5:16",)


# -- the choice --------------------------------------------------------------------------------------------------------------------

FLOPS, BANDWIDTH = 1e9, 1e9


def pair(latency: float, overhead: float) -> Cluster:
    """Return two devices that move bytes in no time.

    Args:
        latency: of a message, s.
        overhead: of a kernel, s.
    """
    device = Device("plain", {"float64": FLOPS, "float32": FLOPS}, 2**40, 1e15, overhead, compute_efficiency=1.0)
    return Cluster([device, device], Link(latency, BANDWIDTH))


def runs(latency: float, overhead: float = 0.0) -> tuple[HaloSegment, ...]:
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    return pm_of(stack(norm=True), x, (2, 1), None, pair(latency, overhead)).plan.halos


@pytest.mark.slow
def test_latency_is_weighed_against_arithmetic_and_kernels() -> None:
    (slow,) = runs(latency=1.0)
    assert (slow.strategy, slow.exchange_messages, slow.recompute_messages) == ("recompute", 3, 1)
    (fast,) = runs(latency=0.0, overhead=1e-3)
    assert fast.strategy == "exchange"
    assert fast.exchange_time < min(fast.overlap_time, fast.recompute_time)
    (hidden,) = runs(latency=1e-5)
    assert hidden.strategy == "overlap"
    assert hidden.overlap_time == pytest.approx(0.0, abs=1e-9)  # a convolution takes longer than a message


def test_prices_are_those_of_the_formulas() -> None:
    """Rows of 2 images x 4 channels x 12 elements; of three convolutions the first computes two rows more, the second one."""
    (run,) = runs(latency=1.0)
    row = 2 * 4 * 12 * 8
    assert run.exchange_time == pytest.approx(3 * 2 * (1.0 + row / BANDWIDTH))
    convolution = 2 * (2 * 12 * 4) * (4 * 9) / FLOPS  # a row, forward; the backward takes twice as long
    assert run.recompute_time == pytest.approx(2 * (1.0 + 3 * row / BANDWIDTH) + (2 + 1) * 3 * convolution, rel=1e-3)


@pytest.mark.slow
def test_the_plan_tells_and_keeps_the_choice() -> None:
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    pm = pm_of(stack(norm=True), x, (2, 1), ONCE)
    assert Plan.from_json(pm.plan.to_json()) == pm.plan
    assert "halos=(HaloSegment(first=" in str(pm.plan)
    text = pm.explain()
    assert "HALOS" in text
    assert "3 messages" in text
    again = partition(stack(norm=True), 2, example_inputs=(x,), plan=pm.plan, progress=False)
    again.train_step(x, target=torch.randn(2, 4, 16, 12, dtype=torch.float64), loss_fn=F.mse_loss)
    assert messages(again) == (1, 1)


def test_a_plan_of_calls_that_are_not_there_is_refused() -> None:
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    plan = pm_of(stack(norm=True), x, (2, 1), ONCE).plan
    wrong = dataclasses.replace(plan, halos=(dataclasses.replace(plan.halos[0], first="missing"),))
    with pytest.raises(ConfigError, match="'missing'"):
        partition(stack(norm=True), 2, example_inputs=(x,), plan=wrong, progress=False)


@pytest.mark.parametrize(
    ("mode", "halo", "message"),
    [
        ({"data": 2}, "recompute", "the mesh has data"),
        ({"tile": 2}, "twice", "not 'twice'"),
        ({"tile": 2}, {"missing": "recompute"}, "'missing', which is no module"),
    ],
)
def test_what_cannot_be_kept_is_refused(mode: dict[str, int], halo: object, message: str) -> None:
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    with pytest.raises(ConfigError, match=message):
        partition(stack(norm=True), 2, mode, example_inputs=(x,), constraints=Constraints(halo=halo), progress=False)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_value_that_several_calls_read_moves_once() -> None:
    """A residual around two convolutions is read by the sum, and by the first of them, which needs two rows more."""
    block = Residual(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), block, nn.Conv2d(4, 4, 3, padding=1)).double()
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    assert first_difference_of_tiles(model, x, 4, {"tile": (2, 2)}, constraints=ONCE) == ""
    pm = pm_of(model, x, (2, 1), ONCE)
    pm.train_step(x, target=torch.randn(2, 4, 16, 12, dtype=torch.float64), loss_fn=F.mse_loss)
    assert messages(pm) == (1, 1)
    assert [(run.exchange_messages, run.recompute_messages) for run in pm.plan.halos] == [(3, 1)]


@pytest.mark.slow
def test_calls_that_another_variant_computes_whole_pay_for_no_halo() -> None:
    """A table of positions is resized: in parts where the plan cuts the model, whole where it is replicated already."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 4,
    }
    config = transformers.BeitConfig(**sizes, use_relative_position_bias=True, hidden_dropout_prob=0.0, drop_path_rate=0.0)
    model = transformers.BeitModel(config).double().eval()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    pm = partition(model, 2, "tile", example_inputs=(x,))
    assert pm.plan.halos
    torch.testing.assert_close(pm(x).last_hidden_state, model(x).last_hidden_state, rtol=1e-9, atol=1e-9)
