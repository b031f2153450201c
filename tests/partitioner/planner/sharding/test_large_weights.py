"""Weights that are larger than activations: replicas cut the batch before them, channels in them, and the numbers stay the same."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster
from partitioner import Plan, partition
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.tracing.trace import trace
from passes.analysis.axis_names import axis_names
from passes.ir.mesh import Mesh
from passes.spmd.shard_stages import cut_by_plan, facts_to_cut

BATCH, WIDTHS = 16, (64, 48)
TRICK = (("batch", "data"), ("ffn", "data"))


class Net(nn.Module):
    """Convolutions, then linear layers that hold most of the weights."""

    def __init__(self, channels: int = 6, widths: tuple[int, int] = WIDTHS, dropout: float = 0.0, size: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        )
        first, second = widths
        self.classifier = nn.Sequential(
            *(nn.Dropout(dropout), nn.Linear(channels * (size // 4) ** 2, first), nn.ReLU()),
            *(nn.Dropout(dropout), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "axes", "dropout", "n_microbatches"),
    [
        ("data", TRICK, 0.5, 2),
        ("data", TRICK, 0.0, 1),
        ("data", (*TRICK, ("features", "data")), 0.0, 1),
        ("data", (("batch", "data"), ("ffn[1]", "data")), 0.0, 1),
        ("data", (*TRICK, ("channels[1]", "data")), 0.0, 1),
        ({"data": 2, "pipeline": 2}, TRICK, 0.0, 2),
        ({"pipeline": 2, "data": 2}, TRICK, 0.5, 1),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_device(
    mode: str | Mapping[str, int], axes: tuple[tuple[str, str], ...], dropout: float, n_microbatches: int
) -> None:
    """In double precision; also of a batch that the replicas do not divide, where all compute all rows."""
    torch.manual_seed(0)
    model = Net(dropout=dropout if n_microbatches == 1 else 0.0).double()
    x, target = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64), torch.randint(10, (BATCH,))
    made = partition(model, 4, mode, example_inputs=(x,), n_microbatches=n_microbatches, progress=False).plan
    plan = Plan.from_json(dataclasses.replace(made, axes=axes).to_json())
    pm = partition(model, 4, plan=plan, example_inputs=(x,), progress=False)
    pm.verify()
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = nn.functional.cross_entropy(reference(x), target)
    expected.backward()
    torch.manual_seed(1)
    loss = pm.train_step(x, target=target, loss_fn=nn.functional.cross_entropy)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=1e-12)
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
    weight = dict(pm.named_parts(0))
    if "pipeline" not in str(mode):
        assert weight["classifier.1.weight"].shape[0] in (WIDTHS[0] // 4, WIDTHS[0])
        assert weight["classifier.1.weight"].numel() < 64 * 24 or weight["classifier.4.weight"].numel() < 64 * 48
    if not dropout:
        with pytest.warns(UserWarning, match="does not divide"):
            torch.testing.assert_close(pm(x[:15]), model(x[:15]), rtol=0, atol=1e-12)


def request(mode: str, count: int) -> PlanRequest:
    return PlanRequest(mode, tuple(f"cuda:{rank}" for rank in range(count)))


@pytest.mark.slow
def test_the_planner_finds_it_by_itself() -> None:
    """Every convolution is cut by rows, every linear layer reads its weight in parts; it takes less than replicas of whole weights."""
    with torch.device("meta"):
        model, x = Net(64, (4096, 4096), size=32), torch.zeros(256, 3, 32, 32)
    graph, cluster = trace(model, (x,), {}, training=True), Cluster.preset("v100", 1, 4)
    plan = plans_auto(graph, cluster, request("auto", 4))[0]
    assert plan.mesh == (("data", 4),)
    assert plan.gap == 0.0
    assert ("batch", "data") in plan.axes
    cut = cut_by_plan(facts_to_cut(graph, plan), plan).widest
    names = axis_names(cut.graph, cut.axes)
    by_kind: dict[str, set[str]] = {"conv2d": set(), "linear": set()}
    for node in cut.graph.graph.nodes:
        kind = node.name.partition("_")[0]
        if kind in by_kind:
            (found,) = cut.layouts.cuts[node.name]
            assert found is not None, node.name
            by_kind[kind].add(names[found.axis].partition("[")[0])
    assert by_kind["conv2d"] == {"batch"}
    assert by_kind["linear"]
    assert "batch" not in by_kind["linear"]
    assert plan.step_time < plan_mesh(graph, cluster, request("model", 4), None, Mesh((("data", 4),))).step_time


@pytest.mark.slow
def test_small_weights_stay_whole() -> None:
    with torch.device("meta"):
        model, x = Net(64, (64, 64)), torch.zeros(65536, 3, 8, 8)
    plan = plans_auto(trace(model, (x,), {}, training=True), Cluster.preset("v100", 1, 4), request("auto", 4))[0]
    assert (plan.mesh, plan.axes) == ((("data", 4),), (("batch", "data"),))
