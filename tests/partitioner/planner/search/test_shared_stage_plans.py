"""Plans of stages on different numbers of ranks: which are proposed, and where they are the best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster, Device, Level, Link
from partitioner import Constraints, PartitionedModel, partition
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.space import allowed_sharing
from partitioner.tracing.trace import trace
from passes.ir.mesh import Mesh
from tests.end_to_end.modes.test_shared_stages import Shape
from tests.support.planning.small_pipelines import ALIKE, perceptron


class HeavyFront(nn.Module):
    """Convolutions with few weights and two thirds of the work, then linear layers with nearly all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8))
        )
        self.classifier = nn.Sequential(*(nn.Linear(16 * 4, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, 16, 16) to (batch, 10)."""
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


@pytest.mark.slow
def test_a_heavy_front_gets_two_of_three_devices() -> None:
    """Replicas would sum the gradients of all weights over slow links, and of three stages one would have all the convolution's work."""
    torch.manual_seed(0)
    model, images, target = HeavyFront().double(), torch.randn(48, 3, 16, 16, dtype=torch.float64), torch.randint(10, (48,))
    cluster = Cluster([Device("d", {"float64": 1e9}, 2**34, 1e12, launch_overhead=1e-7)] * 3, Link(1e-6, 5e6))
    pm = partition(model, 3, example_inputs=(images,), cluster=cluster, progress=False)
    assert pm.plan.stage_ranks == ((0, 1), (2,))
    assert [stage.modules for stage in pm.plan.stages] == [("features",), ("classifier",)]
    assert pm.plan.gap == 0.0
    assert pm.simulate().step_time == pytest.approx(pm.plan.step_time, rel=0.02)
    for other in ("data", "fsdp", "pipeline", "tensor"):
        plan = partition(model, 3, other, example_inputs=(images,), cluster=cluster, progress=False).plan
        assert plan.step_time > 1.1 * pm.plan.step_time, other
    _trains_as(model, pm, images, target)


@pytest.mark.slow
def test_stages_are_given_unlike_numbers_of_nodes() -> None:
    """Three nodes of two devices with slow links between them: the heavy front gets two nodes, and each node cuts its layers."""
    torch.manual_seed(0)
    model, images, target = HeavyFront().double(), torch.randn(48, 3, 16, 16, dtype=torch.float64), torch.randint(10, (48,))
    device = Device("d", {"float64": 1e9}, 2**34, 1e12, launch_overhead=1e-7)
    cluster = Cluster([device] * 6, [Level(2, Link(1e-7, 1e9)), Level(6, Link(1e-6, 5e6))])
    pm = partition(model, 6, example_inputs=(images,), cluster=cluster, progress=False)
    assert pm.plan.mesh == (("pipeline", 3), ("tensor", 2))
    assert pm.plan.stage_ranks == ((0, 1), (2,))
    assert pm.plan.gap == 0.0
    assert pm.simulate().step_time == pytest.approx(pm.plan.step_time, rel=0.02)
    for other in ({"pipeline": 3, "tensor": 2}, {"pipeline": 3, "data": 2}, {"pipeline": (4, 2)}, {"data": 6}):
        plan = partition(model, 6, other, example_inputs=(images,), cluster=cluster, progress=False).plan
        assert plan.step_time > 1.04 * pm.plan.step_time, other
    _trains_as(model, pm, images, target)


def _trains_as(model: nn.Module, pm: PartitionedModel, images: Tensor, target: Tensor) -> None:
    expected = nn.functional.cross_entropy(model(images), target)
    expected.backward()
    torch.testing.assert_close(pm.train_step(images, target=target, loss_fn=nn.functional.cross_entropy), expected)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def sharing(model: nn.Module, n_devices: int, mesh: Mesh | None = None, **arguments: Any) -> set[Shape]:
    graph = trace(model, (torch.zeros(12, 8, dtype=torch.float64),), {}, training=True)
    cluster = Cluster([ALIKE.devices[0]] * n_devices, Link(0.0, 1e15))
    alone = Mesh((("pipeline", n_devices),))
    return set(allowed_sharing(graph, cluster, PlanRequest("auto", ("cpu",) * n_devices, **arguments), mesh or alone))


def test_few_devices_are_given_to_fewer_stages_in_all_ways() -> None:
    assert sharing(perceptron(), 3) == {(2, 1), (1, 2)}
    assert sharing(perceptron(), 4) == {(3, 1), (1, 3), (2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert {(4, 2, 2), (7, 1)} <= sharing(perceptron(), 8)
    assert sharing(perceptron(), 6, Mesh((("pipeline", 3), ("tensor", 2)))) == {(2, 1), (1, 2)}
    assert sharing(perceptron(), 8, Mesh((("data", 4), ("pipeline", 2)))) == set()
    assert sharing(perceptron(), 4, n_microbatches=2) == {(2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2)}


def test_stages_are_not_shared_where_that_is_refused() -> None:
    normalising = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).double()
    assert not sharing(normalising, 3)
    assert not sharing(normalising, 3, n_microbatches=4)
    for arguments in ({"n_microbatches": 1}, {"schedule": "ZBV"}, {"stages_per_rank": 2}, {"constraints": Constraints(device_map={"": 0})}):
        assert not sharing(perceptron(), 3, **arguments)
    assert not sharing(perceptron(), 9)
    assert not sharing(perceptron(), 2)
