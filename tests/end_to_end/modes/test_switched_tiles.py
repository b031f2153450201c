"""Tiles that cut another axis at depth: space early, the batch or channels late, with the numbers of the whole model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster
from partitioner import ConfigError, Constraints, Plan, partition
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.reports.communication.collectives import collectives_of_classes, sent_by_kind
from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.analysis.axis_names import axis_names, batch_axes, space_axes
from passes.ir.comm.primitives import all_gather, halo_exchange
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.normalize.specialize_batch import fix_batch, fixed_for
from passes.spmd.propagate.enumerate_layouts import layout_choices
from passes.spmd.propagate.walk import assign_layouts
from passes.spmd.shard_stages import cut_by_plan, facts_to_cut
from tests.passes.spmd.propagate.test_enumerate_layouts import expect_equal
from tests.support.models.vision.space import TransposedUNet, UShaped
from tests.support.running.tiles import first_difference_of_tiles

Grid = Mapping[str, int | tuple[int, ...]]


def level(channels_in: int, channels: int, norms: bool) -> nn.Sequential:
    first, second = (nn.Conv2d(each, channels, 3, padding=1) for each in (channels_in, channels))
    one, other = (nn.GroupNorm(2, channels) if norms else nn.Identity() for _ in range(2))
    return nn.Sequential(first, one, nn.SiLU(), second, other, nn.SiLU())


class UNet(UShaped):
    """Of any depth; each level normalises two groups of channels, or nothing."""

    def __init__(self, width: int = 4, levels: int = 2, *, norms: bool = True) -> None:
        super().__init__()
        widths = [width * 2**number for number in range(levels + 1)]
        self.down = nn.ModuleList(level(*each, norms) for each in zip((1, *widths[:-2]), widths[:-1], strict=True))
        self.bottom = level(widths[-2], widths[-1], norms)
        steps = list(itertools.pairwise(widths))[::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(inner, outer, 2, 2) for outer, inner in steps)
        self.up = nn.ModuleList(level(2 * outer, outer, norms) for outer, _ in steps)
        self.head = nn.Conv2d(width, 1, 1)


def images(rows: int, channels: int = 1) -> Tensor:
    return torch.randn(rows, channels, 16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def ranks_of(mesh: Grid) -> int:
    return math.prod(size if isinstance(size, int) else math.prod(size) for size in mesh.values())


def cut_along(graph: ModelGraph, plan: Plan) -> dict[str, list[str]]:
    """Convolution -> over each mesh dimension, the name of the axis that cuts it; empty where nothing does."""
    cut = cut_by_plan(facts_to_cut(fixed_for(graph, plan), plan), plan).widest
    names = axis_names(cut.graph, cut.axes)
    convolutions = (name for name in cut.layouts.cuts if name.startswith("conv"))
    return {name: ["" if each is None else names[each.axis].partition("[")[0] for each in cut.layouts.cuts[name]] for name in convolutions}


# -- the same numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("axes", [{"batch": "tile"}, {"channels": "tile"}, {"height[2]": "tile", "batch": "tile"}], ids=str)
@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        pytest.param({"tile": 2}, 3, marks=pytest.mark.slow),
        pytest.param({"tile": 3}, 4, marks=pytest.mark.slow),
        pytest.param({"tile": (2, 2)}, 5, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tile": 2}, 4, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tile": 2}, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_and_gradients(mesh: Grid, rows: int, axes: Mapping[str, str]) -> None:
    """To 1e-9: parts of different sizes, up and down again, grids, beside other dimensions."""
    torch.manual_seed(0)
    assert first_difference_of_tiles(UNet().double(), images(rows), ranks_of(mesh), mesh, constraints=Constraints(axes=axes)) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("axes", [{"batch": "tile"}, {"height[2]": "tile", "batch": "tile"}], ids=str)
def test_beside_tensor_parallelism(axes: Mapping[str, str]) -> None:
    torch.manual_seed(0)
    mesh = {"tile": 2, "tensor": 2}
    assert first_difference_of_tiles(UNet().double(), images(3), ranks_of(mesh), mesh, constraints=Constraints(axes=axes)) == ""


def test_all_channels_over_tiles_leave_none_to_tensor_parallelism() -> None:
    with pytest.raises(ConfigError, match="no axis of the model's parameters can be cut into 2 parts"):
        first_difference_of_tiles(
            UNet().double(), images(3), 4, {"tile": 2, "tensor": 2}, constraints=Constraints(axes={"channels": "tile"})
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("axes", [{"batch": "tile"}, {"channels": "tile"}], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_statistics_of_the_batch(axes: Mapping[str, str], *, training: bool) -> None:
    """Batch normalisation after tiles, after parts of the batch, after channels."""
    torch.manual_seed(0)
    model = TransposedUNet(batch_norm=True).double().train(training)
    assert first_difference_of_tiles(model, images(3, 3), 2, {"tile": 2}, constraints=Constraints(axes=axes)) == ""


def planned(model: nn.Module, x: Tensor, count: int, axes: tuple[tuple[str, str], ...]) -> Plan:
    made = partition(model, count, {"tile": (count, 1)}, example_inputs=(x,), progress=False).plan
    return Plan.from_json(dataclasses.replace(made, axes=axes, halos=()).to_json())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(12))
def test_any_axes_that_a_plan_names(seed: int) -> None:
    """Some heights, in any order, and what stands in for the others."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count, rows = draw.choice((2, 3)), draw.choice((3, 4))
    model, x = UNet().double(), images(rows)
    graph = fix_batch(trace(model, (x,), {}, training=True), rows)
    axes = find_axes(graph.graph)
    names = axis_names(graph, axes)
    fitting = [axis for axis in space_axes(axes)["height"] if axes.sizes[axis] >= count]
    chosen = [names[axis] for axis in draw.sample(fitting, draw.randint(1, len(fitting) - 1))]
    chosen += draw.choice((["batch"], ["channels"], ["batch", "channels"], []))
    pm = partition(
        copy.deepcopy(model), count, plan=planned(model, x, count, tuple((each, "tile0") for each in chosen)), example_inputs=(x,)
    )
    expect_equal_numbers(pm, model, x)


def expect_equal_numbers(pm: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Compare result, gradient of the input and of every parameter, to 1e-9."""
    pm.verify()  # type: ignore[operator]
    of_whole, of_parts = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = model(of_whole), pm(of_parts)
    model.zero_grad()
    pm.zero_grad()
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(of_parts.grad, of_whole.grad, rtol=1e-9, atol=1e-9)
    gradients = pm.full_gradients()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, 3, padding=1)]
    return nn.Sequential(*layers).double()


FIRST_BY_HEIGHT = (("height[1]", "tile0"), ("batch", "tile0"))


@pytest.mark.parametrize("others", [(), pytest.param((5, 1), marks=pytest.mark.slow)], ids=["as_traced", "others"])
def test_other_batches(others: tuple[int, ...]) -> None:
    """A graph has one size; others are lowered anew, also of fewer rows than there are ranks."""
    model, x = convolutions(), images(3)
    pm = partition(copy.deepcopy(model), 2, plan=planned(model, x, 2, FIRST_BY_HEIGHT), example_inputs=(x,), progress=False)
    for rows in (3, *others):
        expect_equal_numbers(pm, model, images(rows))


@pytest.mark.slow
def test_groups_of_channels_over_one_dimension_and_space_over_another() -> None:
    """A rank has some of the groups, and of these some of the rows."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 1)).double()
    assert first_difference_of_tiles(model, images(2), 4, {"tile": (2, 1), "tensor": 2}) == ""


# -- how much moves ----------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_parts_that_change_hands() -> None:
    """Between height and batch every rank gives each other one a part of its part, there and back; nothing is gathered but the result."""
    rows, height, width, channels, element = 3, 16, 12, 4, 8
    model, x = convolutions(), images(rows)
    pm = partition(copy.deepcopy(model), 2, plan=planned(model, x, 2, FIRST_BY_HEIGHT), example_inputs=(x,), progress=False)
    pm.train_step(x, target=torch.zeros(rows, 2, height, width, dtype=torch.float64), loss_fn=nn.functional.mse_loss)
    row = channels * (height // 2) * width * element
    for of_rank, own, others in zip(collectives_of_classes(pm.explained()), (2, 1), (1, 2), strict=True):
        # its tile of their images; their tiles of its images, back
        assert sent_by_kind(of_rank)["all_to_all"] == (others + own) * row
    nodes = [node for rank in range(2) for node in pm.graph(rank).graph.nodes]
    assert not any(node.target is halo_exchange for node in nodes)  # every rank has the images; later windows run over whole rows
    gathered = [node.args[0][0].meta["val"].shape[1] for node in nodes if node.target is all_gather]
    assert gathered == [2, 2]


# -- the choice --------------------------------------------------------------------------------------------------------------------


def test_every_choice_of_space_is_that_of_the_plain_walk() -> None:
    graph = fix_batch(trace(UNet(), (images(3).float(),), {}, training=True), 3)
    axes = find_axes(graph.graph)
    draw = random.Random(0)
    alone = [(axis,) for axis in space_axes(axes)["height"] if axes.sizes[axis] >= 2]
    channels = [axis for axis, name in enumerate(axis_names(graph, axes)) if name.startswith("channels")]
    groups = [*draw.sample(alone, 8), tuple(batch_axes(graph, axes)), *((axis,) for axis in draw.sample(channels, 2))]
    choices = layout_choices(graph, axes, ("tile0", 2), groups)
    for _ in range(20):
        choice = tuple(draw.randint(0, 1) for _ in groups)
        assigned = tuple(axis for group, chosen in zip(groups, choice, strict=True) if chosen for axis in group)
        expect_equal(choices, choice, assign_layouts(graph, axes, (("tile0", 2),), {"tile0": assigned}, ()))


def traced(rows: int, width: int = 32, levels: int = 3, size: int = 256, *, norms: bool = True) -> ModelGraph:
    with torch.device("meta"):
        return trace(UNet(width, levels, norms=norms), (torch.zeros(rows, 1, size, size),), {}, training=True)


def plan_of(graph: ModelGraph, axes: Mapping[str, str] | None, cluster: str) -> Plan:
    hardware = Cluster.parse(cluster)
    count = len(hardware.devices)
    request = PlanRequest("model", tuple(f"cuda:{rank}" for rank in range(count)), constraints=Constraints(axes=axes))
    return plan_mesh(graph, hardware, request, None, Mesh((("tile0", count),)))


@pytest.mark.slow
def test_space_early_and_batch_late_where_messages_are_slow() -> None:
    """Six images on four nodes: the batch in different parts, but for the first layers; less than tiles throughout."""
    graph = traced(6)
    switched, plain = plan_of(graph, {"batch": "tile"}, "a100-80gb:4x1"), plan_of(graph, None, "a100-80gb:4x1")
    along = list(cut_along(graph, switched).values())
    assert along[0] == ["height"]
    assert ["batch"] in along
    assert all(each == ["height"] for each in cut_along(graph, plain).values())
    assert switched.step_time < plain.step_time
    assert Plan.from_json(switched.to_json()) == switched


@pytest.mark.slow
def test_less_than_space_alone() -> None:
    """Six images on four devices: by height down to the third level, below by the batch, up again by height; also when simulated."""
    with torch.device("meta"):
        model, x = UNet(width=8, levels=4), torch.zeros(6, 1, 384, 384)
    made = {
        name: partition(model, 4, {"tile": (4, 1)}, example_inputs=(x,), cluster="l4:1x4", constraints=freed, training=True, progress=False)
        for name, freed in (("space", None), ("switched", Constraints(axes={"batch": "tile"})))
    }
    switched, space = made["switched"], made["space"]
    cut = cut_along(trace(model, (x,), {}, training=True), switched.plan)
    assert [name for name, _ in itertools.groupby(cut.values(), key=lambda each: each[0])] == ["height", "batch", "height"]
    assert switched.plan.prediction.axes_gap == 0.0
    assert switched.plan.step_time < 0.9 * space.plan.step_time
    assert switched.simulate().step_time < 0.9 * space.simulate().step_time


@pytest.mark.slow
def test_tiles_throughout_unless_somebody_says_otherwise() -> None:
    """Requested tiles are used wherever space is long enough."""
    plan = plan_of(traced(6), None, "a100-80gb:4x1")
    assert plan.axes == (("height", "tile0"),)
    assert plan.prediction.axes_gap == 0.0


class Narrowing(nn.Module):
    """Down to less than there are tiles, and much to compute there."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(8))
        self.deep = nn.Sequential(nn.Conv2d(16, 512, 2), nn.ReLU(), nn.Conv2d(512, 512, 1), nn.ReLU(), nn.Conv2d(512, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, 32, 256) images."""
        result: Tensor = self.deep(self.down(x))
        return result


def test_what_is_too_short_for_tiles_is_cut_otherwise() -> None:
    """Four rows become three, of four tiles: the batch, or channels, stand in, where before every rank computed all of it."""
    with torch.device("meta"):
        graph = trace(Narrowing(), (torch.zeros(64, 3, 32, 256),), {}, training=True)
    plan = plan_of(graph, None, "v100:1x4")
    first, *deep = cut_along(graph, plan).values()
    assert first == ["height"]
    assert all(each in (["batch"], ["channels"]) for each in deep)
    assert "with other axes than space" in plan.prediction.contenders[0].words or "tile0 4" in plan.prediction.runner_up


def auto(graph: ModelGraph, memory: str | None = None) -> Plan:
    request = PlanRequest("auto", ("cuda:0", "cuda:1"), recompute="none", memory_limit=memory)
    return plans_auto(graph, Cluster.parse("l4:1x2"), request)[0]


def test_auto_cuts_a_single_image_in_space() -> None:
    """Two devices and one image: nothing to cut by rows, and halos are little beside the work."""
    plan = auto(traced(1, width=16, levels=1, size=512, norms=False))
    assert plan.mesh == (("tile0", 2),)
    assert plan.axes == (("height", "tile0"),)


@pytest.mark.slow
def test_auto_takes_tiles_where_whole_images_do_not_fit() -> None:
    """Two images over two devices have no halos; in halves they take longer, and less memory than pipelines, of which none fits."""
    graph = traced(2, width=8, levels=2, size=256, norms=False)
    plain, forced = auto(graph), auto(graph, "28MiB")
    assert plain.mesh == (("data", 2),)
    assert (forced.mesh, forced.n_microbatches) == ((("tile0", 2),), 2)
    assert max(forced.memory) <= 28 * 2**20 < max(plain.memory)
    assert plain.step_time < forced.step_time


def test_a_name_that_no_tile_could_be_cut_by() -> None:
    with pytest.raises(ConfigError, match="no operation of the model can be cut by batch"):
        partition(
            convolutions(), 2, {"tile": 2}, example_inputs=(images(1),), constraints=Constraints(axes={"batch": "tile"}), progress=False
        )


def test_explained_by_regions() -> None:
    model, x = convolutions(), images(3)
    made = planned(model, x, 2, FIRST_BY_HEIGHT)
    text = partition(model, 2, plan=made, example_inputs=(x,), progress=False).explain()
    table = text.partition("REGIONS\n")[2].partition("\n\n")[0].splitlines()
    assert table[0].split() == ["over", "layers", "cut", "along"]
    assert [line.split() for line in table[1:]] == [["tile0", "0", "height"], ["tile0", "2,", "4", "batch"]]
