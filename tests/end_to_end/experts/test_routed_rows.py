"""Experts without a capacity, over the ranks that cut the batch: each token goes to the ranks of its experts, and comes back.

How many rows go where is known when a step runs; the programs exchange the counts first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cost_models.hardware.clusters import Cluster, Device, Link
from partitioner import Constraints, PartitionedModel, PartitionError
from partitioner.reports.communication.collectives import collectives_of_classes, sent_by_kind
from passes.ir.comm.expert_rows import route_rows, row_counts
from passes.ir.comm.primitives import all_reduce, all_to_all
from passes.ir.errors import VerificationError
from passes.verify.programs import verify
from tests.passes.emit.test_communication_counts import collectives_of
from tests.support.models.attention.experts import DROPLESS, EXPERTS, LENGTH, WIDTH, Dropless, chosen_experts
from tests.support.models.case import BATCH_SIZE, Case, Instance
from tests.support.running.transparency import compare_gradients, compare_values, first_difference, make_partitioned, reference_steps

ELEMENT, NUMBER = 8, 8
"""Bytes of a number in float64, and of one in int64."""

CHOICES = 2
"""Experts of a token."""

OVER_DATA = Constraints(axes={"experts": "data"})


def after_a_step(case: Case, mode: str | Mapping[str, int] = "data", devices: int = 2, **options: Any) -> PartitionedModel:
    instance = case.build()
    pm = make_partitioned(instance, mode=mode, devices=devices, **{"constraints": OVER_DATA, **options})
    pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
    return pm


def calls(pm: PartitionedModel, target: Any, rank: int = 0) -> list[fx.Node]:
    return [node for node in pm.graph(rank).graph.nodes if node.target is target]


# -- equal -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "devices", "dimension", "options"),
    [
        ({"pipeline": 2, "data": 2}, 4, "data", {"n_microbatches": 2}),
        *(
            pytest.param(mode, devices, dimension, options, marks=pytest.mark.slow)
            for mode, devices, dimension, options in (
                ("data", 2, "data", {}),
                ("data", 3, "data", {"batch_size": 9}),  # four experts over three ranks are uneven parts
                ("data", 4, "data", {}),
                ("data", 2, "data", {"recompute": "full"}),
                ("data", 2, "data", {"recompute": "selective"}),
                ("fsdp", 2, "fsdp", {}),
                ("fsdp", 2, "fsdp", {"recompute": "full"}),
                ("zero1", 2, "zero1", {}),
                ({"data": 2, "tensor": 2}, 4, "data", {}),
                ({"data": 2, "fsdp": 2}, 4, "data", {}),
                ({"data": 2, "fsdp": 2}, 4, "fsdp", {}),
                ({"pipeline": 2, "data": 2}, 4, "data", {"n_microbatches": 4, "schedule": "ZB1P"}),
            )
        ),
    ],
)
def test_training(mode: str | Mapping[str, int], devices: int, dimension: str, options: dict[str, Any]) -> None:
    options = {"batch_size": BATCH_SIZE, **options}
    constraints = Constraints(axes={"experts": dimension})
    assert first_difference(DROPLESS, mode=mode, devices=devices, constraints=constraints, **options) is None


def sent_to(instance: Instance, experts: Sequence[int]) -> Instance:
    """Have all tokens choose two experts, the first of them more."""
    model: Any = instance.model
    for mixture, norm in zip(model.mixtures, model.norms, strict=True):
        with torch.no_grad():
            norm.weight.mul_(0.01)
            norm.bias.fill_(1.0)
            for expert in range(EXPERTS):
                mixture.gate.weight[expert] = 3.0 - experts.index(expert) if expert in experts else -1.0 - expert
    return instance


@pytest.mark.slow
@pytest.mark.parametrize("experts", [(3, 2), (0, 1), (0, 3)])
def test_a_rank_whose_experts_nobody_chose_computes_no_rows(experts: tuple[int, int]) -> None:
    case = dataclasses.replace(DROPLESS, model=lambda: sent_to(DROPLESS.build(), experts).model)
    counts = chosen_experts(case.build().model, *case.build().args)["mixtures.0"]
    assert [expert for expert, count in enumerate(counts) if count] == sorted(experts)
    assert first_difference(case, n_microbatches=1, mode="data", devices=2, constraints=OVER_DATA) is None


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, pytest.param(6, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:a batch of 1 rows does not divide over 2 ranks")
def test_one_partition_serves_every_batch(rows: int) -> None:
    """One row a rank, and one that both compute."""
    instance, other = DROPLESS.build(), DROPLESS.build(batch_size=rows)
    pm = make_partitioned(instance, mode="data", devices=2, constraints=OVER_DATA)
    reference = reference_steps(DROPLESS, n_steps=1, batch_size=rows)
    loss = pm.train_step(*other.args, target=other.target, loss_fn=DROPLESS.loss_fn)
    assert compare_values(reference.losses[0], loss.detach(), DROPLESS.tolerance) is None
    assert compare_gradients(reference.gradients[0], pm.full_gradients(), DROPLESS.tolerance) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["silu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("index", "add", "mul", "grouped_mm_1"))]
)
def test_rows_are_back_where_a_stage_ends(first: str) -> None:
    """A cut between two products of a mixture: tokens go to their experts once more after it."""
    pm = make_partitioned(DROPLESS.build(), mode={"pipeline": 2, "data": 2}, devices=4, constraints=OVER_DATA, n_microbatches=2)
    stages = (pm.plan.stages[0], dataclasses.replace(pm.plan.stages[1], first_node=first))
    assert first_difference(DROPLESS, n_microbatches=2, devices=4, plan=dataclasses.replace(pm.plan, stages=stages)) is None


class Between(Dropless):
    """Between the products stand a factor of each token, a number of each expert, and a part of the width that one reads outside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1).repeat_interleave(CHOICES, 0)
        scores, chosen = self.gate(x.flatten(0, 1)).softmax(dim=-1).topk(CHOICES, dim=-1)
        group, product = chosen.flatten(), torch.ops.partitioner.grouped_mm
        both = product(tokens * scores.view(-1, 1), self.up, group, True)
        gate, up = both[:, ::2].clamp(max=2.0), both.unflatten(-1, (10, 2))[..., 1]
        hidden = gate.sigmoid() * up * self.scale[group].unsqueeze(-1) * scores.flatten().unsqueeze(-1)
        beside = both.square().mean(dim=-1, keepdim=True)
        y = product(hidden, self.down, group) * beside + product(up.tanh(), self.down, group)
        result: Tensor = y.view(-1, CHOICES, WIDTH).sum(1).view_as(x)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data", {"data": 2, "tensor": 2}])
def test_what_stands_between_the_products(mode: str | Mapping[str, int]) -> None:
    case = dataclasses.replace(DROPLESS, model=lambda: nn.Sequential(Between(), nn.Linear(WIDTH, 3)))
    devices = 2 if mode == "data" else 4
    assert first_difference(case, mode=mode, devices=devices, constraints=OVER_DATA) is None
    pm = after_a_step(case, mode, devices)
    assert len(calls(pm, route_rows)) == 1


class Of(Dropless):
    """A function of what the first product gives, (rows, 20), stands before the second, which takes ten columns."""

    def __init__(self, function: Callable[[Of, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.rand(10)), nn.Parameter(torch.rand(10))
        self.square = nn.Parameter(torch.rand(10, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens, product = x.flatten(0, 1), torch.ops.partitioner.grouped_mm
        _, chosen = self.gate(tokens).topk(CHOICES, dim=-1)
        both = product(tokens.repeat_interleave(CHOICES, 0), self.up, chosen.flatten(), True)
        y = product(self.function(self, both), self.down, chosen.flatten())
        result: Tensor = y.view(-1, CHOICES, WIDTH).sum(1).view_as(x)
        return result


FUNCTIONS: Mapping[str, Callable[[Of, Tensor], Tensor]] = {
    "softmax": lambda _, both: both.chunk(2, -1)[0].softmax(-1) * both.chunk(2, -1)[1],
    "cumsum": lambda _, both: both.cumsum(-1)[:, :10].sin() * both.chunk(2, -1)[1],
    "layer norm": lambda m, both: F.layer_norm(both.chunk(2, -1)[0] * both.chunk(2, -1)[1], (10,), m.weight, m.bias),
    "rms norm": lambda m, both: F.rms_norm(both.chunk(2, -1)[0] * both.chunk(2, -1)[1], (10,), m.weight),
    "group norm": lambda m, both: F.group_norm(both.chunk(2, -1)[0], 2, m.weight, m.bias) * both.chunk(2, -1)[1],
    "mean": lambda _, both: both.chunk(2, -1)[0] * both.chunk(2, -1)[1].mean(-1, keepdim=True),
    "variance": lambda _, both: both.chunk(2, -1)[0] * both.chunk(2, -1)[1].var(-1, keepdim=True),
    "greatest": lambda _, both: both[:, :10] * both[:, 10:].amax(-1, keepdim=True),
    "sorted": lambda _, both: both.chunk(2, -1)[0].sort(-1).values * both.chunk(2, -1)[1],
    "views": lambda _, both: both.view(-1, 2, 10)[:, 0].tanh() * both.unflatten(1, (2, 10))[:, 1],
    "linear": lambda m, both: F.linear(both.chunk(2, -1)[0] * both.chunk(2, -1)[1], m.square),
    "slices": lambda _, both: torch.cat([both[:, :5], both[:, 15:]], 1) * both.chunk(2, -1)[1],
    "expanded": lambda _, both: both[:, :1].expand(-1, 10) * both[:, 10:] + both.new_ones(both.shape[0], 10),
    "mean of all rows": lambda _, both: both[:, :10] * both[:, 10:].mean(0),
}
"""Calls by row, and others: sizes of rows, sums over columns that another dimension cuts, values of all rows."""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_function_between_the_products(name: str, devices: int) -> None:
    """With columns cut over another dimension of the mesh, and without."""
    case = dataclasses.replace(
        DROPLESS, model=lambda: nn.Sequential(Of(FUNCTIONS[name]), nn.Linear(WIDTH, 3)), compares_rows=name == "mean of all rows"
    )
    mode: str | dict[str, int] = "data" if devices == 2 else {"data": 2, "tensor": 2}
    axes = {"experts": "data"} if devices == 2 else {"experts": "data", "ffn": "tensor"}
    assert first_difference(case, mode=mode, devices=devices, constraints=Constraints(axes=axes)) is None


class Sorted(Dropless):
    """Of two results of a call between the products, one is read by the second product, and the other one outside."""

    def forward(self, x: Tensor) -> Tensor:
        tokens, product = x.flatten(0, 1), torch.ops.partitioner.grouped_mm
        _, chosen = self.gate(tokens).topk(CHOICES, dim=-1)
        values, places = product(tokens.repeat_interleave(CHOICES, 0), self.up, chosen.flatten(), True).sort(-1)
        y = product(values[:, :10] * values[:, 10:], self.down, chosen.flatten())
        y = y * (places * torch.arange(20)).to(x).mean(-1, keepdim=True)
        result: Tensor = y.view(-1, CHOICES, WIDTH).sum(1).view_as(x)
        return result


def test_another_result_of_a_call_between_the_products_is_read_outside() -> None:
    case = dataclasses.replace(DROPLESS, model=lambda: nn.Sequential(Sorted(), nn.Linear(WIDTH, 3)))
    assert first_difference(case, mode="data", devices=2, constraints=OVER_DATA) is None


@pytest.mark.slow
def test_a_check_compares_what_goes_to_experts_and_comes_back() -> None:
    instance = DROPLESS.build()
    pm = make_partitioned(instance, mode="data", devices=2, constraints=OVER_DATA)
    text = str(pm.check(*instance.args))
    assert "EQUAL" in text
    assert "values of nodes" in text


# -- counted ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_token_goes_once_for_each_of_its_experts(devices: int) -> None:
    """Of the rows of a rank, (n - 1) / n leave it: forward once to the experts and once back, backward the same, in both mixtures."""
    pm = after_a_step(DROPLESS, devices=devices)
    rows = BATCH_SIZE * LENGTH * CHOICES // devices
    found = [each for each in collectives_of(pm.graph(0).graph) if each.kind is not all_reduce]
    assert {each.kind for each in found} == {all_to_all}
    tokens, numbers, counts = rows * WIDTH * ELEMENT, rows * NUMBER, devices * NUMBER
    assert sorted(each.n_bytes for each in found if not each.backward) == sorted([tokens, tokens, numbers, counts] * 2)
    assert [each.n_bytes for each in found if each.backward] == [tokens] * 4
    for of_rank in collectives_of_classes(pm.explained()):
        sent = sent_by_kind(of_rank)["all_to_all"]
        assert sent == 2 * (4 * tokens + numbers + counts) * (devices - 1) // devices


@pytest.mark.slow
def test_a_rank_stores_its_experts_and_sums_no_gradient_of_them() -> None:
    pm = after_a_step(DROPLESS)
    held = {name: tuple(parameter.shape) for name, parameter in pm.named_parts(0)}
    assert held["mixtures.0.up"] == (EXPERTS // 2, 20, WIDTH)
    assert held["mixtures.0.down"] == (EXPERTS // 2, 10, WIDTH)
    names = {name for node in calls(pm, all_reduce) for name in node.meta.get("reduces", ())}
    assert any("gate" in name for name in names)
    assert not any(name.endswith(("_up", "_down")) for name in names)


@pytest.mark.slow
def test_what_goes_between_ranks_is_said() -> None:
    text = " ".join(after_a_step(DROPLESS).explain().split())  # a cell may be wrapped
    assert "experts/data" in text
    assert "rows go to the rank that stores their expert, and come back" in text


def test_the_plan_pays_for_rows_that_go_and_come_back() -> None:
    """With messages of a second: of a mixture tokens and the experts of rows go, tokens come back, and gradients both ways."""
    cluster = Cluster([Device("instant", {"float32": 1e18, "float64": 1e18}, 2**30, 1e18)] * 2, Link(1.0, 1e15))
    times = []
    for constraints in (None, OVER_DATA):
        pm = make_partitioned(DROPLESS.build(), mode="data", devices=2, cluster=cluster, constraints=constraints)
        times.append(pm.plan.prediction.step_time)
    whole, routed = times
    assert round(routed - whole) == 2 * 5


# -- proved ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_counts_of_other_rows_are_refused() -> None:
    """A program that expects of a rank what it gets from its other exchange."""
    pm = after_a_step(DROPLESS)
    programs = pm.inspected().programs
    first, second = [node for node in programs[0].module.graph.nodes if node.target is row_counts and not node.kwargs["sends"]][:2]
    first.args = (*first.args[:3], second.args[3])
    with pytest.raises((VerificationError, PartitionError), match="all_to_all"):
        verify(programs)
