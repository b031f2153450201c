"""Parameters of ZeRO are gathered once a step, whatever the number of microbatches; gradients of ``"zero1"`` are scattered once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner import PartitionedModel, partition
from passes.emit.overlap_collectives import overlap_communication
from passes.ir.comm.functional import FOR_ALL
from passes.ir.comm.primitives import all_gather, receive, reduce_scatter, send, wait
from tests.support.running.slow_values import all_but, slow
from tests.support.running.transparency import assert_step_equals

Mode = str | Mapping[str, int]
WIDTH, ROWS, MICROBATCHES = 8, 12, 3


class Tied(nn.Module):
    """Layers that share a weight or a bias, so that stages read the same parameters, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight, self.middle.bias = self.first.weight, self.first.bias
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.frozen(self.first(x).tanh()).relu()).sigmoid())


def perceptron(width: int = WIDTH, depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))).double()


def partitioned(model: nn.Module, mode: Mode, devices: int, width: int = WIDTH, **options: Any) -> tuple[PartitionedModel, Tensor]:
    x = torch.randn(ROWS, width, dtype=torch.float64)
    options = {"n_microbatches": MICROBATCHES, **options}
    return partition(model, devices=devices, mode=mode, example_inputs=(x,), progress=False, **options), x


def bytes_of(pm: PartitionedModel, function: Any, rank: int) -> int:
    return sum(node.meta["bytes"] for node in pm.graph(rank).graph.nodes if node.target is function)


@pytest.mark.parametrize(("kind", "scatters"), [("zero1", 1), ("zero2", MICROBATCHES)])
@pytest.mark.parametrize("in_stages", [True, False])
def test_bytes_of_a_step(kind: str, scatters: int, in_stages: bool) -> None:
    mode: Mode = {kind: 2, "pipeline": 2} if in_stages else kind
    model = perceptron()
    pm, x = partitioned(model, mode, 4 if in_stages else 2)
    assert_step_equals(pm, model, x, target=torch.randn_like(x))
    counts = Counter[str]()
    for rank in range(4 if in_stages else 2):
        counts["gathered"] += bytes_of(pm, all_gather, rank)
        counts["scattered"] += bytes_of(pm, reduce_scatter, rank)
    whole = sum(parameter.numel() for parameter in model.parameters()) * 8 * 2  # both ranks of the dimension take part
    assert counts == {"gathered": whole // 2, "scattered": whole * scatters}


def check(model: nn.Module, mode: Mode, devices: int, **options: Any) -> None:
    """Compare a training step, and a call with its backward, with the model's."""
    pm, x = partitioned(model, mode, devices, **options)
    target = torch.randn_like(x)
    assert_step_equals(pm, model, x, target=target)
    model.zero_grad()
    pm.zero_grad()
    for each in (pm, model):
        (each(x) * target).sum().backward()
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.parametrize("kind", ["zero1", *slow("zero2")])
@pytest.mark.parametrize("schedule", all_but(["ZB1P"], ["GPipe", "1F1B", "ZB1P", "Interleaved1F1B", "ZBV", "DualPipeV"]))
def test_schedules(kind: str, schedule: str) -> None:
    """Stages scatter after their last backward, or after its weight half; ranks have one stage or two."""
    check(perceptron(), {kind: 2, "pipeline": 2}, 4, schedule=schedule, n_microbatches=4)


MESHES: list[tuple[Mode, int]] = [
    ("zero1", 3),
    ("zero2", 3),
    ({"zero1": 2, "tensor": 2}, 4),
    ({"data": 2, "zero1": 2}, 4),
    ({"data": 2, "pipeline": 2, "zero1": 2}, 8),
]


@pytest.mark.parametrize("mesh", [MESHES[0], *slow(*MESHES[1:])], ids=str)
@pytest.mark.parametrize("width", [*slow(WIDTH), 7])
def test_meshes(mesh: tuple[Mode, int], width: int) -> None:
    """Parameters of a width that ranks divide, and of one that they do not."""
    check(perceptron(width), *mesh, width=width, n_microbatches=3)


@pytest.mark.parametrize("recompute", [*slow("none"), "full"])
@pytest.mark.parametrize("mode", [{"zero1": 2, "pipeline": 2}, *slow("zero1", {"zero2": 2, "pipeline": 2})])
def test_parameters_that_several_stages_read(mode: Mode, recompute: str) -> None:
    torch.manual_seed(0)
    check(Tied().double(), mode, 2 if isinstance(mode, str) else 4, recompute=recompute)


@pytest.mark.parametrize(("reduce_dtype", "element"), [(None, 4), ("bfloat16", 2)])
def test_microbatches_are_added_in_float32(reduce_dtype: str | None, element: int) -> None:
    """Whatever type they are scattered in; parameters are gathered in bfloat16."""
    model = perceptron(32).float()
    x, target = torch.randn(24, 32), torch.randn(24, 32)
    options: dict[str, Any] = {"precision": "bf16-mixed", "reduce_dtype": reduce_dtype, "n_microbatches": 6}
    pm = partition(model, 4, "zero1", example_inputs=(x,), progress=False, **options)
    pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    n_elements = sum(parameter.numel() for parameter in model.parameters())
    assert (bytes_of(pm, all_gather, 0), bytes_of(pm, reduce_scatter, 0)) == (n_elements * 2 // 4, n_elements * element)
    expected = _summed_gradients(model, x, target)
    for name, gradient in pm.full_gradients().items():
        assert gradient is not None
        difference = torch.linalg.vector_norm(gradient - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert difference < (1e-6 if reduce_dtype is None else 4e-3)  # 4e-3: one rounding to bfloat16


def _summed_gradients(model: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the gradients of one row a rank and microbatch under autocast, each in bfloat16, summed in float32."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for rows, targets in zip(x.split(1), target.split(1), strict=False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(rows), targets) * rows.shape[0] / x.shape[0]
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad
    return sums


@pytest.mark.parametrize(
    ("mode", "devices"), [("zero1", 2), pytest.param({"data": 2, "zero1": 2, "pipeline": 2}, 8, marks=pytest.mark.slow)]
)
def test_steps_that_accumulate_and_smaller_batches(mode: Mode, devices: int) -> None:
    """Gradients of ``no_sync`` are added to those of the next step; a batch of other rows has fewer microbatches, or smaller ones."""
    model, loss_fn = perceptron(), nn.functional.mse_loss
    pm, x = partitioned(model, mode, devices)
    target = torch.randn_like(x)
    with pm.no_sync():
        pm.train_step(x, target=target, loss_fn=loss_fn)
    loss_fn(model(x), target).backward()
    for rows in (ROWS - 4, 4):
        pm.train_step(x[:rows], target=target[:rows], loss_fn=loss_fn)
        loss_fn(model(x[:rows]), target[:rows]).backward()
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_a_gradient_that_an_earlier_stage_waits_for_is_sent_first() -> None:
    model = perceptron()
    pm, x = partitioned(model, {"zero1": 2, "pipeline": 2}, 4, schedule="Interleaved1F1B", stages_per_device=2)
    assert_step_equals(pm, model, x, target=torch.randn_like(x))
    for rank in range(4):
        nodes = list(pm.graph(rank).graph.nodes)
        scatters = [node for node in nodes if node.target is reduce_scatter]
        assert {node.meta["section"].microbatch for node in scatters} == {MICROBATCHES - 1}
        for scatter in scatters:
            later = nodes[nodes.index(scatter) :]
            assert scatter.meta["section"] not in {node.meta["section"] for node in later if node.target is send}
            first_wait = min(later.index(user) for user in scatter.users)
            assert not any(node.target in (send, receive) for node in later[first_wait:])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_parameters_of_all_stages_of_a_rank_are_gathered_before_it_computes(precision: str) -> None:
    """Their casts, too: the gathers for a later stage run beside the forwards of an earlier one."""
    x = torch.randn(ROWS, WIDTH)
    options: dict[str, Any] = {"schedule": "Interleaved1F1B", "stages_per_device": 2, "n_microbatches": 2, "precision": precision}
    pm = partition(perceptron(depth=8).float(), 4, {"zero1": 2, "pipeline": 2}, example_inputs=(x,), progress=False, **options)
    for rank in range(4):
        nodes = list(pm.graph(rank).graph.nodes)
        gathers = [place for place, node in enumerate(nodes) if node.target is all_gather]
        assert len({nodes[place].meta["section"].stage for place in gathers}) == 2
        assert max(gathers) < min(place for place, node in enumerate(nodes) if node.target is wait or node.op == "call_module")


def test_what_is_computed_from_the_sum_of_all_microbatches_comes_at_the_end() -> None:
    graph = fx.Graph()
    gradient, x = graph.placeholder("gradient"), graph.placeholder("x")
    scatter = graph.call_function(reduce_scatter, ([gradient],))
    part = graph.call_function(operator.getitem, (graph.call_function(wait, (scatter,)), 0))
    view = graph.call_function(torch.ops.aten.view.default, (part, [-1]))
    scatter.meta[FOR_ALL] = view.meta[FOR_ALL] = True
    result = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output((view, result))
    overlap_communication([graph])
    order = [node.target for node in graph.nodes if node.op == "call_function"]
    assert order == [reduce_scatter, torch.ops.aten.relu.default, wait, operator.getitem, torch.ops.aten.view.default]
