"""Constraints: what the user decided is kept to the letter, and what cannot be kept is refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

from cost_models.hardware.clusters import Cluster
from partitioner.options.constraints import Constraints
from partitioner.planner.search.make_plan import PlanRequest, make_plan
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan


class Blocks(nn.Module):
    """Four blocks of two layers, and a head; a dropout that evaluation removes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.dropout(x))
        return y


@functools.cache
def blocks() -> ModelGraph:
    return trace(Blocks().eval(), (torch.rand(8, 8),))


def planned(count: int, constraints: Constraints, **fields: Any) -> Plan:
    devices = tuple(f"cuda:{rank}" for rank in range(count))
    fields = {"schedule": "1F1B", **fields}
    return make_plan(blocks(), Cluster.preset("v100", 1, count), PlanRequest("pipeline", devices, constraints=constraints, **fields))


def firsts(plan: Plan) -> list[str]:
    return [stage.first_node for stage in plan.stages]


@pytest.mark.parametrize("end", ["end", "END", SplitPoint.END])
@pytest.mark.parametrize("beginning", ["beginning", SplitPoint.BEGINNING])
def test_split_spec_cuts_where_it_says(beginning: Any, end: Any) -> None:
    plan = planned(3, Constraints(split_spec={"blocks.1": beginning, "blocks.1.0": end}))
    assert firsts(plan) == ["linear", "linear_1", "relu_1"]


def test_fewer_split_points_than_cuts_leave_the_rest_to_the_planner() -> None:
    plan = planned(3, Constraints(split_spec={"head": "beginning"}))
    assert "linear_4" in firsts(plan)
    assert len(plan.stages) == 3


def test_device_map_places_modules_and_everything_else() -> None:
    plan = planned(2, Constraints(device_map={"blocks.0": 0, "": 1}))
    assert firsts(plan) == ["linear", "linear_1"]
    plan = planned(2, Constraints(device_map={"": 0, "blocks.3": 1, "head": "cuda:1"}))
    assert firsts(plan) == ["linear", "linear_3"]


def test_the_longest_prefix_of_device_map_counts() -> None:
    plan = planned(2, Constraints(device_map={"blocks": 0, "blocks.3.1": 1, "head": 1}))
    assert firsts(plan) == ["linear", "relu_3"]


def test_modules_without_an_entry_are_planned() -> None:
    plan = planned(3, Constraints(device_map={"blocks.0": 0, "head": 2}))
    assert len(plan.stages) == 3
    assert plan.stages[0].modules[0] == "blocks.0"
    assert plan.stages[2].modules[-1] == "head"


def test_with_several_stages_on_a_rank_device_map_may_return() -> None:
    going_back = Constraints(device_map={"blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1, "head": 0})
    with pytest.raises(ConfigError, match="device_map goes back: 'head' is on rank 0"):
        planned(2, going_back)
    plan = planned(2, going_back, schedule="ZBV")
    assert plan.stage_ranks == ((0,), (1,), (1,), (0,))
    assert firsts(plan)[0] == "linear"
    assert firsts(plan)[1] == "linear_1"
    assert firsts(plan)[3] == "linear_4"


def test_a_module_without_parameters_gives_way_to_the_order() -> None:
    plan = planned(2, Constraints(device_map={"blocks.0.0": 0, "blocks.0.1": 1, "blocks.1": 0}))
    assert [*plan.stages[0].modules][:2] == ["blocks.0", "blocks.1"]
    assert plan.notes[-1] == "device_map: 'blocks.0.1' has no parameters: it runs on rank 0, where the order of computation requires it"


def test_pin_puts_modules_and_nodes_in_stages() -> None:
    plan = planned(2, Constraints(pin={"blocks.2": 0, "relu_2": 0, "linear_3": 1}))
    assert firsts(plan) == ["linear", "linear_3"]


def test_a_module_that_computes_nothing_may_be_named_if_the_model_has_it() -> None:
    constraints = Constraints(device_map={"blocks": 0, "dropout": 1, "head": 1})
    modules = frozenset(name for name, _ in Blocks().named_modules())
    assert firsts(planned(2, constraints, modules=modules)) == ["linear", "linear_4"]
    with pytest.raises(ConfigError, match="dropout"):
        planned(2, constraints)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"device_map": {"block.0": 0}}, r"(?s)'block.0'.*did you mean"),
        ({"split_spec": {"heads": "beginning"}}, r"(?s)'heads'.*'head'"),
        ({"pin": {"linear_99": 0}}, "'linear_99'"),
        ({"device_map": {"head": 7}}, "rank 7"),
        ({"device_map": {"head": "disk"}}, "no rank runs there"),
        ({"pin": {"head": 5}}, "stage 5"),
        ({"split_spec": {"head": "middle"}}, "'middle'"),
        ({"split_spec": {"head": "end"}}, "nothing more"),
        ({"split_spec": {"blocks.0": "beginning"}}, "nothing more"),
        ({"split_spec": {f"blocks.{index}": "end" for index in range(4)}}, "makes 5 stages, the plan has 2"),
        ({"pin": {"head": 0}}, "no way to cut"),
        ({"device_map": {"": 0}}, "no way to cut"),
        ({"device_map": {"blocks.0": 0, "blocks.1": 1, "blocks.2": 0}}, "goes back"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(constraints: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(2, Constraints(**constraints))


def test_a_device_map_without_stages_names_modes_that_have_them() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'head' on rank 1, and the mesh has one rank for stages.*mode=\"pipeline\" or \"model\""):
        planned(1, Constraints(device_map={"head": 1}))


def test_two_ranks_on_one_device_need_numbers() -> None:
    request = PlanRequest("pipeline", ("cpu", "cpu"), constraints=Constraints(device_map={"head": "cpu"}))
    with pytest.raises(ConfigError, match="2 ranks run there"):
        make_plan(blocks(), Cluster.preset("cpu", 1, 2), request)


def test_what_cannot_be_parted_is_not_split() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor, largest: Tensor) -> Tensor:
            return x / largest

    class Watch(nn.Module):
        largest: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.largest.copy_(x.detach().abs().amax())
            return x

    class Scaled(nn.Module):
        """One module reads the buffer that the next one writes."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale, self.watch, self.rectify = nn.Linear(8, 8), Scale(), Watch(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.rectify(self.watch(self.scale(self.layer(x), self.watch.largest)))
            return y.sum()

    graph = trace(Scaled(), (torch.rand(4, 8),))
    cluster = Cluster.preset("v100", 1, 2)
    for constraints, message in (
        (Constraints(split_spec={"watch": "beginning"}), "crosses that cannot be sent"),
        (Constraints(device_map={"scale": 0, "watch": 1}), "cannot be parted"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_plan(graph, cluster, PlanRequest("pipeline", ("cpu", "cpu"), constraints=constraints))
    plan = make_plan(graph, cluster, PlanRequest("pipeline", ("cpu", "cpu"), constraints=Constraints(split_spec={"layer": "end"})))
    assert plan.stages[0].first_node == "linear"
