"""Models of images and volumes over tiles train as in one piece: losses, gradients and weights of three AdamW steps.

What is cheap always runs; all models over 2, 3, 4 and 6 tiles are marked slow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, partition
from passes.ir.comm.primitives import all_gather, halo_add, halo_exchange
from tests.support.models.case import Case
from tests.support.models.vision.space import SPACE, space_case
from tests.support.running.slow_values import slow
from tests.support.running.tiles import first_difference_of_tiles
from tests.support.running.transparency import first_difference

Mesh = Mapping[str, int | tuple[int, ...]]
Mode = str | Mesh

QUICK = {("dcgan_generator", 2)}
"""Cases that always run."""


def ranks_of(mesh: Mesh) -> int:
    return math.prod(size if isinstance(size, int) else math.prod(size) for size in mesh.values())


def difference(case: Case, mesh: Mesh, rows: int = 2, n_microbatches: int = 1) -> str:
    found = first_difference(case, batch_size=rows, n_microbatches=n_microbatches, devices=ranks_of(mesh), mode=mesh)
    return "" if found is None else str(found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        pytest.param(case.name, tiles, marks=() if (case.name, tiles) in QUICK else (pytest.mark.slow,))
        for place, case in enumerate(SPACE)
        for tiles in (2, 3, 4, 6)
        if (case.name, tiles) in QUICK or tiles in ((2, 6), (3, 4))[place % 2]
    ],
)
def test_training(name: str, tiles: int) -> None:
    assert difference(space_case(name), {"tile": tiles}) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (1, 4)])
@pytest.mark.parametrize("name", ["transposed_unet", "segformer", "convnext_images"])
def test_grids(name: str, grid: tuple[int, ...]) -> None:
    assert difference(space_case(name), {"tile": grid}) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "training"),
    [
        pytest.param(case, training, id=f"{case.name}-{'training' if training else 'evaluation'}")
        for place, case in enumerate(SPACE)
        for training in (True, False)
        if training == (place % 2 == 0) or case.batch_norm
    ],
)
def test_gradients_of_inputs(case: Case, *, training: bool) -> None:
    """To 1e-9; models with batch normalisation by the statistics of the batch and by those that are kept, others one way."""
    instance = case.build(batch_size=2)
    assert first_difference_of_tiles(instance.model.train(training), instance.args[0], 4, {"tile": 4}) == ""


class FlattenedNorm(nn.Module):
    """An image whose channels, rows and columns are the channels of a group normalisation."""

    def __init__(self, groups: int, start: int) -> None:
        super().__init__()
        self.start = start
        self.norm = nn.GroupNorm(groups, 6 * 5 * 4 if start == 1 else 6 * 5)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        averaged = nn.functional.avg_pool2d(x, 3, 1, 1)
        result: Tensor = self.norm(averaged.flatten(1) if self.start == 1 else averaged.flatten(1, 2))
        return result


@pytest.mark.parametrize(
    ("start", "devices", "mode"),
    [
        pytest.param(1, 2, "tile", marks=pytest.mark.slow),
        (1, 1, {"tile": 2}),
        (2, 1, {"tile": 2}),
        pytest.param(2, 2, "tile", marks=pytest.mark.slow),
        *(
            pytest.param(start, 4, mode, marks=pytest.mark.slow)
            for start in (1, 2)
            for mode in ({"tile": (2, 2)}, {"tensor": 2, "tile": 2})
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [2, *slow(1, 6)])
def test_groups_of_channels_that_hold_space(groups: int, start: int, devices: int, mode: Mode) -> None:
    """A rank's part of a group is every element that its rows of the image have in it, in each of the channels."""
    torch.manual_seed(0)
    model, x = FlattenedNorm(groups, start).double(), torch.randn(3, 6, 5, 4, dtype=torch.float64)
    pm = partition(model, devices, mode, example_inputs=(x,))
    torch.testing.assert_close(pm(x), model(x), rtol=1e-12, atol=1e-12)
    model(x).square().mean().backward()
    pm.train_step(x, target=torch.zeros(3), loss_fn=lambda output, _: output.square().mean())
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-12, atol=1e-12)


# -- beside other modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["transposed_unet", "residual_images"])
@pytest.mark.parametrize("mesh", [{"tile": 2, "pipeline": 2}, {"pipeline": 2, "tile": (2, 1)}, {"tile": (2, 2), "data": 2}], ids=str)
def test_images_beside_stages_and_replicas(name: str, mesh: Mesh) -> None:
    """Statistics of the whole batch, in stages that run it at once; the gradient of the input comes back through both."""
    assert difference(space_case(name), mesh, rows=4) == ""
    instance = space_case(name).build(batch_size=4)
    assert first_difference_of_tiles(instance.model.eval(), instance.args[0], ranks_of(mesh), mesh) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "n_microbatches"),
    [
        ({"data": 2, "tile": 2}, 1),
        ({"tile": (2, 2), "data": 2}, 1),
        ({"fsdp": 2, "tile": 2}, 1),
        ({"tile": 2, "tensor": 2}, 1),
        ({"pipeline": 2, "tile": 2}, 2),
        ({"pipeline": 2, "tile": (2, 2)}, 2),
    ],
)
@pytest.mark.timeout(600)
def test_meshes(mesh: Mesh, n_microbatches: int) -> None:
    name = "transposed_unet_of_groups" if "pipeline" in mesh else "segmentation_of_volumes"
    case = dataclasses.replace(space_case(name), batch_norm="pipeline" not in mesh and space_case(name).batch_norm)
    assert difference(case, mesh, rows=4, n_microbatches=n_microbatches) == ""


def strided() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1)]
    return nn.Sequential(*layers).double(), torch.randn(2, 3, 16, 10, dtype=torch.float64)


HEIGHT = Constraints(axes={"height": "tensor"})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 2, "tile": (2, 1)}, {"tile": (2, 1), "tensor": 2}])
def test_height_cut_by_name(mesh: Mesh) -> None:
    """Over a dimension that would cut channels of its own accord; beside tiles of the height, the outer of the two cuts what slides."""
    model, x = strided()
    assert first_difference_of_tiles(model, x, ranks_of(mesh), mesh, constraints=HEIGHT) == ""


@pytest.mark.slow
def test_tiles_inside_stages() -> None:
    def stack() -> nn.Module:
        layers = [layer for _ in range(2) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU())]
        return nn.Sequential(nn.Conv2d(3, 2, 1), *layers)

    case = dataclasses.replace(
        space_case("transposed_unet_of_groups"),
        name="stages",
        model=stack,
        target=lambda draw, rows: torch.randn(rows, 2, 20, 12, generator=draw, dtype=torch.float64),
    )
    assert difference(case, {"pipeline": 2, "tile": 2}, rows=4, n_microbatches=2) == ""


# -- hard borders ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape", "grid"),
    [
        pytest.param(nn.Conv2d(2, 2, 9, padding=4), (6, 5), 6, id="halo_wider_than_a_neighbour"),
        pytest.param(nn.Conv2d(2, 2, 3, padding=8, dilation=4), (7, 4), 4, id="padding_wider_than_a_tile", marks=pytest.mark.slow),
        pytest.param(
            nn.Conv2d(2, 2, 3, padding=2, padding_mode="circular"), (5, 5), (2, 2), id="around_the_ends_and_corners", marks=pytest.mark.slow
        ),
        pytest.param(nn.Conv2d(2, 2, 3, padding=3, padding_mode="reflect"), (8, 5), (2, 2), id="mirrored_corners", marks=pytest.mark.slow),
        pytest.param(nn.Conv2d(2, 2, 2, stride=3), (13, 11), (3, 2), id="elements_that_nobody_reads", marks=pytest.mark.slow),
    ],
)
def test_borders(layer: nn.Module, shape: tuple[int, int], grid: int | tuple[int, int]) -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 2, 1), layer).double(), torch.randn(2, 2, *shape, dtype=torch.float64)
    assert first_difference_of_tiles(model, x, ranks_of({"tile": grid}), {"tile": grid}) == ""


@pytest.mark.slow
def test_sizes_smaller_than_the_grid_are_gathered_there() -> None:
    """16 -> 8 -> 4 -> 2 over three tiles: once, before what makes them two."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(2))]
    model, x = nn.Sequential(*layers).double(), torch.randn(2, 2, 16, 4 * 4, dtype=torch.float64)
    assert first_difference_of_tiles(model, x, 3, {"tile": 3}) == ""
    pm = partition(model, devices=3, mode={"tile": 3}, example_inputs=(x,), progress=False)
    gathers = [node.kwargs for node in pm.graph(0).graph.nodes if node.target is all_gather]
    assert len(gathers) == 1


def test_seams_are_equal_bit_by_bit() -> None:
    """In float32, the two rows and columns on either side of each seam: a convolution adds the same terms in the same order there."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)]
    model, x = nn.Sequential(*layers), torch.randn(2, 3, 64, 48)
    exchanged = Constraints(halo="exchange")
    pm = partition(model, devices=4, mode={"tile": (2, 2)}, example_inputs=(x,), constraints=exchanged, progress=False)
    with torch.no_grad():
        expected, found = model(x), pm(x)
    assert torch.equal(found[:, :, 14:18], expected[:, :, 14:18])
    assert torch.equal(found[..., 10:14], expected[..., 10:14])


# -- how much moves ----------------------------------------------------------------------------------------------------------------


def convolutional(*, kernel: int = 3) -> nn.Module:
    """Nothing but convolutions and norms, and a size that is kept."""
    layers: list[nn.Module] = [nn.Conv2d(3, 4, kernel, padding=kernel // 2), nn.BatchNorm2d(4), nn.ReLU()]
    layers += [nn.Conv2d(4, 4, kernel, padding=kernel // 2), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 1)]
    return nn.Sequential(*layers).double()


@pytest.mark.slow
@pytest.mark.parametrize(("tiles", "kernel"), [(4, 3), (2, 3), (2, 5), (4, 5)])
def test_bytes_are_those_of_the_halo(tiles: int, kernel: int) -> None:
    """Each of the inner borders: ``kernel // 2`` rows each way, forward and backward, of the one layer that reads of another."""
    rows, height, width, element = 2, 16, 10, 8
    x = torch.randn(rows, 3, height, width, dtype=torch.float64)
    pm = partition(convolutional(kernel=kernel), devices=tiles, mode={"tile": (tiles, 1)}, example_inputs=(x,), progress=False)
    pm.train_step(x, target=torch.zeros(rows, 2, height, width, dtype=torch.float64), loss_fn=nn.functional.mse_loss)
    given = {halo_exchange: 0, halo_add: 0}
    for rank in range(tiles):
        for node in pm.graph(rank).graph.nodes:
            if node.target in given:
                given[node.target] += node.meta["bytes"]
    border = rows * 4 * width * (kernel // 2) * element
    assert given == {halo_exchange: 2 * (tiles - 1) * border, halo_add: 2 * (tiles - 1) * border}


class Patches(nn.Module):
    """A convolution written as windows side by side and a product, put together again as windows that overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix = nn.Conv2d(3, 2, 1), nn.Linear(2 * 9, 2 * 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of its input, two channels."""
        columns = nn.functional.unfold(self.before(x), 3, padding=1)
        return nn.functional.fold(self.mix(columns.transpose(1, 2)).transpose(1, 2), x.shape[2:], 3, padding=1)


GRIDS: dict[str, tuple[tuple[int, int], list[int]]] = {
    "height": ((3, 1), [2 * 4 * 10]),
    "width": ((1, 2), [2 * 12 * 5]),
    "both": ((2, 2), [2 * 6 * 5, 2 * 6 * 10]),
}
"""Sharded axes -> a grid, and the elements of the gathered value: the result, for the caller of the model, along one axis and the other."""


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["height", "width", "both"])
def test_patches_are_not_gathered(cut: str) -> None:
    grid, expected = GRIDS[cut]
    model, x = Patches().double(), torch.randn(2, 3, 12, 10, dtype=torch.float64)
    assert first_difference_of_tiles(model, x, math.prod(grid), {"tile": grid}) == ""
    pm = partition(model, devices=math.prod(grid), mode={"tile": grid}, example_inputs=(x,), progress=False)
    pm.train_step(x, target=torch.zeros(2, 2, 12, 10, dtype=torch.float64), loss_fn=nn.functional.mse_loss)
    gathered = [node.args[0][0] for node in pm.graph(0).graph.nodes if node.target is all_gather]
    assert sorted(math.prod(value.meta["val"].shape[1:]) for value in gathered) == expected


@pytest.mark.slow
def test_norms_gather_no_activations() -> None:
    """All that is gathered is the result, for the caller of the model."""
    x = torch.randn(2, 3, 16, 10, dtype=torch.float64)
    pm = partition(convolutional(), devices=4, mode={"tile": (2, 2)}, example_inputs=(x,), progress=False)
    pm.train_step(x, target=torch.zeros(2, 2, 16, 10, dtype=torch.float64), loss_fn=nn.functional.mse_loss)
    for rank in range(4):
        nodes = list(pm.graph(rank).graph.nodes)
        gathered = [node for node in nodes if node.target is all_gather]
        assert [tuple(node.args[0][0].meta["val"].shape[:2]) for node in gathered] == [(2, 2)] * 2  # along the height, and the width
