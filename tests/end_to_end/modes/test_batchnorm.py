"""BatchNorm in every mode with a pipeline: exact by default, announced by name where microbatches have statistics of their own."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.hardware.clusters import Device, Link
from cost_models.ops.work import Work
from partitioner import ConfigError, InfeasiblePlanError, PartitionedModel, PartitionWarning, Plan, partition
from partitioner.schedules.catalog import SCHEDULES
from tests.support.running.slow_values import all_but

ROWS = 8


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)) if stride > 1 else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(y + self.shortcut(x), inplace=True)


class SmallResNet(nn.Module):
    """A ResNet-18 with one block a layer, of few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.layer1, self.layer2, self.layer3 = Residual(4, 4, 1), Residual(4, 8, 2), Residual(8, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return SmallResNet().double()


def convolutions(norm: nn.Module | None = None) -> nn.Module:
    """Return two convolutions, each with a normalisation."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(3, 4, 3, 2), "norm1": norm or nn.BatchNorm2d(4), "relu": nn.ReLU()}
    layers |= {"conv2": nn.Conv2d(4, 4, 3, 2), "norm2": copy.deepcopy(norm) or nn.BatchNorm2d(4), "flatten": nn.Flatten()}
    return nn.Sequential(OrderedDict({**layers, "head": nn.Linear(4 * 3 * 3, 5)})).double()


def images(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def labels(rows: int = ROWS) -> Tensor:
    return torch.arange(rows) % 5


def partitioned(model: nn.Module, devices: int, mode: str | Mapping[str, Any], **arguments: Any) -> PartitionedModel:
    return partition(model, devices, mode, example_inputs=(images(),), progress=False, **arguments)


class CountsFlops:
    """A second for every floating-point operation, none for its start or for messages: a pipeline gains by every microbatch."""

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        return float(work.flops)

    def transfer_time(self, size: float, link: Link) -> float:
        return 0.0


def of(name: str) -> Callable[[str], str]:
    """Put a name before a message."""
    return lambda text: f"{name}: {text}"


def check_two_steps(model: nn.Module, pm: PartitionedModel) -> None:
    """Check that outputs, losses, gradients, weights and running statistics of two steps are the model's."""
    reference = copy.deepcopy(model)
    own, other = torch.optim.SGD(reference.parameters(), lr=0.1), torch.optim.SGD(pm.parameters(), lr=0.1)
    for _ in range(2):
        own.zero_grad()
        other.zero_grad()
        loss = F.cross_entropy(reference(images()), labels())
        loss.backward()
        torch.testing.assert_close(pm.train_step(images(), target=labels(), loss_fn=F.cross_entropy), loss.detach())
        found = pm.full_gradients()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=of(f"gradient of {name}"))
        own.step()
        other.step()
    with torch.no_grad():
        torch.testing.assert_close(pm(images()), reference(images()))
    state = pm.full_state_dict()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(state[name], tensor, msg=of(name))


# -- exact -------------------------------------------------------------------------------------------------------------------------------

MESHES: dict[str, tuple[int, str | dict[str, Any]]] = {
    "pipeline": (3, "pipeline"),
    "model": (2, "model"),
    "data x pipeline": (4, {"data": 2, "pipeline": 2}),
    "pipeline x tensor": (4, {"pipeline": 2, "tensor": 2}),
    "fsdp x pipeline": (4, {"fsdp": 2, "pipeline": 2}),
    "stages of different width": (3, {"pipeline": 2, "tensor": (2, 1)}),
    "auto": (4, "auto"),
}


@pytest.mark.parametrize("name", all_but(["pipeline"], MESHES))
def test_the_default_trains_as_the_model(name: str) -> None:
    devices, mode = MESHES[name]
    model = resnet()
    pm = partitioned(model, devices, mode)
    assert pm.plan.n_microbatches == 1
    check_two_steps(model, pm)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_exact(schedule: str) -> None:
    model = resnet()
    pm = partitioned(model, 2, "pipeline", schedule=schedule)
    assert (pm.plan.schedule, pm.plan.n_microbatches) == (schedule, 1)
    check_two_steps(model, pm)


@pytest.mark.slow
def test_resnet_of_transformers_is_exact() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 2], "layer_type": "basic", "num_labels": 5}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)).double().train()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    for devices, mode in ((2, "pipeline"), (4, {"data": 2, "pipeline": 2}), (2, "auto")):
        reference = copy.deepcopy(model)
        pm = partition(model, devices, mode, example_inputs=(x,), progress=False)
        reference(x, labels=labels(4)).loss.backward()
        pm.train_step(x, target=labels(4), loss_fn=lambda output, target: F.cross_entropy(output.logits, target))
        found, state = pm.full_gradients(), pm.full_state_dict()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=of(name))
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(state[name], buffer, msg=of(name))


@pytest.mark.slow
def test_why_the_batch_is_not_cut_is_a_note() -> None:
    text = " ".join(partitioned(convolutions(), 2, "pipeline").explain().split())
    assert (
        "The batch is not cut into microbatches, which would change the numbers of batch normalisation in training (norm1, norm2); "
        'n_microbatches= or batchnorm="local" allows it.'
    ) in text


@pytest.mark.slow
def test_evaluation_has_microbatches() -> None:
    """Stored statistics mix no rows."""
    model = convolutions().eval()
    pm = partitioned(model, 2, "pipeline", cost_model=CountsFlops())
    assert pm.plan.n_microbatches > 1
    torch.testing.assert_close(pm(images()), model(images()))


@pytest.mark.slow
def test_instance_statistics_are_no_reason_for_one_microbatch() -> None:
    model = convolutions(nn.InstanceNorm2d(4, affine=True))
    pm = partitioned(model, 2, "pipeline", cost_model=CountsFlops())
    assert pm.plan.n_microbatches > 1
    torch.testing.assert_close(pm(images()), model(images()))


@pytest.mark.slow
def test_running_statistics_of_instances_are_those_of_the_batch() -> None:
    model = convolutions(nn.InstanceNorm2d(4, track_running_stats=True))
    pm = partitioned(model, 2, "pipeline")
    pm(images())
    model(images())
    torch.testing.assert_close(pm.full_state_dict()["norm1.running_mean"], model.get_buffer("norm1.running_mean"))


def test_statistics_of_the_batch_in_evaluation() -> None:
    """Without stored statistics BatchNorm normalises over the batch in evaluation too."""
    model = convolutions(nn.BatchNorm2d(4, track_running_stats=False)).eval()
    pm = partitioned(model, 2, "pipeline")
    assert pm.plan.n_microbatches == 1
    torch.testing.assert_close(pm(images()), model(images()))


# -- cumulative averages -----------------------------------------------------------------------------------------------------------------


class Halves(nn.BatchNorm2d):
    """A layer of the user's that calls torch's ``forward``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  of torch
        return super().forward(input * 0.5) + 1


AVERAGES: dict[str, tuple[nn.Module, int, str | dict[str, Any]]] = {
    "data": (nn.BatchNorm2d(4, momentum=None), 2, "data"),
    "tile": (Halves(4, momentum=None), 2, "tile"),
    "pipeline": (nn.BatchNorm2d(4, momentum=None, affine=False), 2, "pipeline"),
    "model": (nn.BatchNorm2d(4, momentum=None), 2, "model"),
    "fsdp": (nn.SyncBatchNorm(4, momentum=None), 2, "fsdp"),
    "tensor": (nn.BatchNorm2d(4, momentum=None), 2, "tensor"),
    "untracked": (nn.BatchNorm2d(4, momentum=None, track_running_stats=False), 2, "data"),
    "data x tile": (nn.BatchNorm2d(4, momentum=None), 4, {"data": 2, "tile": 2}),
    "data x pipeline": (nn.BatchNorm2d(4, momentum=None), 4, {"data": 2, "pipeline": 2}),
    "auto": (nn.BatchNorm2d(4, momentum=None), 2, "auto"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", all_but(["data"], AVERAGES))
def test_cumulative_averages_are_the_models(name: str) -> None:
    """``momentum=None``: running statistics are averages over all batches, the first of which replaces the initial values."""
    norm, devices, mode = AVERAGES[name]
    model = convolutions(norm)
    pm = partitioned(model, devices, mode)
    check_two_steps(model, pm)


@pytest.mark.slow
def test_cumulative_averages_in_calls_of_any_batch() -> None:
    model = convolutions(nn.BatchNorm2d(4, momentum=None)).eval()
    pm = partitioned(model, 2, "data")
    torch.testing.assert_close(pm(images()), model(images()))
    pm.train()
    model.train()
    for rows in (8, 6, 4):
        torch.testing.assert_close(pm(images(rows)), model(images(rows)))
    pm.eval()
    model.eval()
    torch.testing.assert_close(pm(images()), model(images()))
    torch.testing.assert_close(dict(pm.full_state_dict()), dict(model.state_dict()))


def test_cumulative_averages_under_microbatches_are_those_of_all_microbatches() -> None:
    model = convolutions(nn.BatchNorm2d(4, momentum=None))
    with pytest.warns(PartitionWarning):
        pm = partitioned(model, 2, "pipeline", n_microbatches=4)
    for _ in range(2):
        pm.train_step(images(), target=labels(), loss_fn=F.cross_entropy)
        for x in images().chunk(4):
            model(x)
    state = pm.full_state_dict()
    for name, buffer in model.named_buffers():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(state[name], buffer, msg=of(name))
    assert int(state["norm1.num_batches_tracked"]) == 2


@pytest.mark.slow
def test_cumulative_averages_of_repeated_blocks() -> None:
    """Blocks that are traced once, and a layer that is called twice in a forward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.norm(self.conv(self.norm(x))))

    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).double()
    for devices, mode in ((2, "pipeline"), (2, "data")):
        check_two_steps(model, partitioned(model, devices, mode))


# -- microbatch statistics, announced ----------------------------------------------------------------------------------------------------

SAID = r"BatchNorm under microbatches: .*\(norm1, norm2\).* each of {} microbatches.*differ.*\n  remedy: n_microbatches=1 gives"


@pytest.mark.parametrize(
    ("devices", "mode", "arguments"),
    [
        (2, "pipeline", {"n_microbatches": 4}),
        pytest.param(2, "pipeline", {"n_microbatches": 4, "batchnorm": "local"}, marks=pytest.mark.slow),
        pytest.param(4, {"data": 2, "pipeline": 2}, {"n_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(2, "data", {"n_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(2, "auto", {"n_microbatches": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_microbatch_statistics_are_announced(devices: int, mode: Any, arguments: dict[str, Any]) -> None:
    with pytest.warns(PartitionWarning, match=SAID.format(4)) as caught:
        pm = partitioned(convolutions(), devices, mode, **arguments)
    (warning,) = caught
    assert warning.filename == __file__
    for text in (repr(pm), pm.explain(), pm._repr_html_()):
        flat = " ".join(text.split())
        assert "batch normalisation in training (norm1, norm2) takes its statistics over each of 4 microbatches" in flat
        assert "running statistics are updated 4 times a step" in flat


def test_local_statistics_let_the_planner_choose_microbatches() -> None:
    with pytest.warns(PartitionWarning):
        pm = partitioned(convolutions(), 2, "pipeline", batchnorm="local", cost_model=CountsFlops())
    assert (pm.plan.batchnorm, pm.plan.n_microbatches > 1) == ("local", True)


def test_microbatches_are_the_model_trained_on_each_in_turn() -> None:
    """Text of the warning: statistics of each microbatch, and running statistics updated once a microbatch."""
    model = convolutions()
    with pytest.warns(PartitionWarning):
        pm = partitioned(model, 2, "pipeline", n_microbatches=4)
    pm.train_step(images(), target=labels(), loss_fn=F.cross_entropy)
    for x, target in zip(images().chunk(4), labels().chunk(4), strict=True):
        (F.cross_entropy(model(x), target) / 4).backward()
    found, state = pm.full_gradients(), pm.full_state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    for name, buffer in model.named_buffers():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(state[name], buffer)
    assert int(state["norm1.num_batches_tracked"]) == 1  # calls of the model: no rows decide it


@pytest.mark.slow
def test_a_plan_with_microbatches_is_announced_where_it_is_lowered() -> None:
    with pytest.warns(PartitionWarning):
        plan = Plan.from_json(partitioned(convolutions(), 2, "pipeline", n_microbatches=2).plan.to_json())
    with pytest.warns(PartitionWarning, match=SAID.format(2)):
        partitioned(convolutions(), 2, "pipeline", plan=plan)


@pytest.mark.slow
def test_exact_plans_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partitioned(convolutions(), 2, "pipeline", n_microbatches=1)
        partitioned(convolutions(), 2, "data", batchnorm="local")
        partitioned(convolutions().eval(), 2, "pipeline", n_microbatches=4)


def test_buffers_updated_from_the_batch_are_those_of_the_whole_batch() -> None:
    class Centred(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))
            return self.last(hidden)

    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64)
    for n_microbatches in (None, 4):
        model = Centred().double()
        pm = partition(model, 2, "pipeline", example_inputs=(x,), n_microbatches=n_microbatches, cost_model=CountsFlops(), progress=False)
        assert pm.plan.n_microbatches > 1
        torch.testing.assert_close(pm(x), model(x))
        torch.testing.assert_close(pm.full_state_dict()["mean"], model.mean)


# -- no statistics ------------------------------------------------------------------------------------------------------------------------


def features() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()


def test_microbatches_of_one_value_are_refused() -> None:
    """The variance of one value is nan, and running statistics became it."""
    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"more than one value per channel: a batch of 4 in 4 microbatches leaves one\n  where: module 1"):
        partition(features(), 2, "pipeline", example_inputs=(x,), n_microbatches=4, progress=False)
    with pytest.raises(ConfigError, match="a batch of 4 over 4 ranks leaves one"):
        partition(features(), 4, "data", example_inputs=(x,), batchnorm="local", progress=False)
    model = features()
    pm = partition(model, 4, "data", example_inputs=(x,), progress=False)
    torch.testing.assert_close(pm(x), model(x))
    with pytest.raises(ConfigError, match="a batch of 1 leaves one"):
        pm(x[:1])


def test_the_planner_leaves_every_microbatch_two_values() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    fixed: dict[str, Any] = {"example_inputs": (x,), "batchnorm": "local", "cost_model": CountsFlops(), "progress": False}
    for devices in (2, 4):
        with pytest.warns(PartitionWarning):
            pm = partition(features(), devices, "pipeline", **fixed)
        assert pm.plan.n_microbatches == 2


def test_a_model_that_fits_only_in_microbatches_names_them() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"pass n_microbatches=, which takes the statistics of norm1, norm2 over"):
        partitioned(convolutions(), 2, "pipeline", memory_limit=1000)
