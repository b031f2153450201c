"""Experts over the ranks that cut the batch: tokens go to the rank that holds their expert, and back, in an all_to_all each.

Counted as in the papers: of the tokens in their places, (n - 1) / n leave a rank (Lepikhin et al., GShard, 2021).
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from partitioner import ConfigError, Constraints, PartitionedModel
from partitioner.reports.communication.collectives import collectives_of_classes, sent_by_kind
from passes.ir.comm.primitives import COLLECTIVES, all_reduce, all_to_all
from tests.passes.emit.test_communication_counts import collectives_of
from tests.support.models.attention.experts import CAPACITY, DROPLESS, EXPERTS, ROUTED, WIDTH
from tests.support.models.case import BATCH_SIZE
from tests.support.running.transparency import (
    Difference,
    compare_gradients,
    compare_values,
    first_difference,
    make_partitioned,
    reference_steps,
)

ELEMENT = 8
"""Bytes of a number in float64."""


def over(dimension: str) -> Constraints:
    return Constraints(axes={"experts": dimension})


def difference_of(way: str, mode: str | Mapping[str, int], devices: int, dimension: str) -> Difference | None:
    batch_size = 9 if devices == 3 else BATCH_SIZE
    n_microbatches = 2 if "pipeline" in mode else 1
    return first_difference(
        ROUTED[way], batch_size=batch_size, n_microbatches=n_microbatches, mode=mode, devices=devices, constraints=over(dimension)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "mode", "devices", "dimension"),
    [
        ("products", "data", 3, "data"),
        ("products", {"data": 2, "tensor": 2}, 4, "data"),
        ("index", {"data": 2, "pipeline": 2}, 4, "data"),
        ("index", "data", 2, "data"),
        ("one_group", "data", 2, "data"),
        *(
            pytest.param(way, mode, devices, dimension, marks=pytest.mark.slow)
            for way in ROUTED
            for mode, devices, dimension in (
                ("data", 2, "data"),
                ("data", 4, "data"),
                ("fsdp", 2, "fsdp"),
                ("zero1", 3, "zero1"),
                ("zero2", 2, "zero2"),
                ("tensor", 2, "tensor"),
                ({"data": 2, "fsdp": 2}, 4, "fsdp"),
                ({"data": 2, "fsdp": 2}, 4, "data"),
                ({"data": 2, "tensor": 2}, 4, "tensor"),
                ({"data": 2, "pipeline": 2, "tensor": 2}, 8, "data"),
                ({"data": 4, "tensor": 2}, 8, "data"),
            )
        ),
    ],
)
def test_training(way: str, mode: str | Mapping[str, int], devices: int, dimension: str) -> None:
    """Four experts over three ranks are uneven parts."""
    assert difference_of(way, mode, devices, dimension) is None


def after_a_step(way: str, devices: int, mode: str | Mapping[str, int] = "data", dimension: str = "data") -> PartitionedModel:
    case = ROUTED[way]
    instance = case.build()
    pm = make_partitioned(instance, mode=mode, devices=devices, constraints=over(dimension))
    pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
    return pm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "devices"),
    [("products", 2), ("products", 4), ("index", 2)],
)
def test_tokens_go_and_come_back_once(way: str, devices: int) -> None:
    """Two mixtures: four exchanges forward, four backward; all else is the sum of what all ranks hold."""
    pm = after_a_step(way, devices)
    places = BATCH_SIZE * EXPERTS * CAPACITY * WIDTH * ELEMENT
    for rank in range(devices):
        found = [each for each in collectives_of(pm.graph(rank).graph) if each.kind is not all_reduce]
        assert [each.kind for each in found] == [all_to_all] * 8
        assert [each.backward for each in found] == [False] * 4 + [True] * 4
        assert {each.n_bytes for each in found} == {places // devices}


@pytest.mark.slow
def test_tokens_go_over_the_inner_of_two_dimensions_that_cut_rows() -> None:
    pm = after_a_step("index", 4, {"data": 2, "zero1": 2}, "zero1")
    groups = [each.group for each in collectives_of(pm.graph(1).graph) if each.kind is all_to_all]
    assert groups == [(0, 1)] * 8


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_a_rank_holds_its_experts_and_sums_no_gradient_of_them(devices: int) -> None:
    pm = after_a_step("products", devices)
    held = {name: tuple(parameter.shape) for name, parameter in pm.named_parts(0)}
    assert any(shape == (EXPERTS // devices, WIDTH, 10) for shape in held.values())
    for rank in range(devices):
        summed = [node for node in pm.graph(rank).graph.nodes if node.target is all_reduce and "loss" not in node.name]
        names = {name for node in summed for name in node.meta["reduces"]}
        assert any("gate" in name for name in names)
        assert not any("up" in name or "down" in name for name in names)


@pytest.mark.slow
def test_what_leaves_a_rank_is_said() -> None:
    """Half of the tokens in their places, for each of the eight exchanges of a step."""
    pm = after_a_step("products", 2)
    text = " ".join(pm.explain().split())  # a cell may be wrapped
    assert "experts/data" in text
    assert "what reads it is cut over another axis" in text
    places = BATCH_SIZE // 2 * EXPERTS * CAPACITY * WIDTH * ELEMENT
    for of_rank in collectives_of_classes(pm.explained()):
        assert sent_by_kind(of_rank)["all_to_all"] == 8 * places // 2


@pytest.mark.slow
def test_tokens_of_all_rows_in_one_group_meet_and_it_is_said() -> None:
    pm = after_a_step("one_group", 2)
    assert any("rows of the batch are mixed" in note for note in pm.plan.notes)
    kinds = {node.target for node in pm.graph(0).graph.nodes if node.target in COLLECTIVES}
    assert all_to_all not in kinds


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_computed_whole_by_those_who_hold_the_experts() -> None:
    case = ROUTED["products"]
    pm = make_partitioned(case.build(), mode="data", devices=2, constraints=over("data"))
    reference, instance = reference_steps(case, n_steps=1, batch_size=7), case.build(batch_size=7)
    with pytest.warns(UserWarning, match="a batch of 7 rows does not divide over 2 ranks"):
        loss = pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
    assert compare_values(reference.losses[0], loss.detach(), case.tolerance) is None
    assert compare_gradients(reference.gradients[0], pm.full_gradients(), case.tolerance) is None


@pytest.mark.slow
def test_a_plan_with_experts_is_read_back() -> None:
    case = ROUTED["index"]
    first, second = case.build(), case.build()
    pm = make_partitioned(first, mode="data", devices=2, constraints=over("data"))
    assert pm.plan.axes == (("batch", "data"), ("experts", "data"))
    again = make_partitioned(second, mode="data", devices=2, plan=type(pm.plan).from_json(pm.plan.to_json()))
    with torch.no_grad():
        assert compare_values(pm(*first.args), again(*first.args), 0.0) is None


# -- routing without capacity: as many tokens for each expert as chose it ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "devices", "axes"),
    [
        pytest.param({"data": 2, "tensor": 2}, 4, {}, marks=pytest.mark.slow),
        ("pipeline", 2, {}),
        *(
            pytest.param(mode, devices, axes, marks=pytest.mark.slow)
            for mode, devices, axes in (
                ("data", 2, {}),
                ("fsdp", 2, {}),
                ("tensor", 3, {"ffn": "tensor"}),
                ("tensor", 2, {"experts": "tensor"}),
                ({"pipeline": 2, "tensor": 2}, 4, {}),
            )
        ),
    ],
)
def test_dropless(mode: str | Mapping[str, int], devices: int, axes: Mapping[str, str]) -> None:
    constraints = Constraints(axes=axes) if axes else None
    assert first_difference(DROPLESS, mode=mode, devices=devices, constraints=constraints) is None


def test_a_pipeline_cuts_the_batch_of_dropless_experts() -> None:
    pm = make_partitioned(DROPLESS.build(), mode="pipeline", devices=2, n_microbatches=4, schedule="1F1B")
    assert pm.plan.n_microbatches == 4
    assert not any("rows of the batch are mixed" in note for note in pm.plan.notes)


@pytest.mark.slow
def test_dropless_experts_are_cut_like_a_feed_forward_layer() -> None:
    """Columns, then rows: of the activations, one sum forward, and backward those of the tokens and of their weights."""
    instance = DROPLESS.build()
    pm = make_partitioned(instance, mode="tensor", devices=2, constraints=Constraints(axes={"ffn": "tensor"}))
    pm.train_step(*instance.args, target=instance.target, loss_fn=DROPLESS.loss_fn)
    found = list(collectives_of(pm.graph(0).graph))
    assert {each.kind for each in found} == {all_reduce}
    assert sum(not each.backward for each in found) == 2
    held = {name: tuple(parameter.shape) for name, parameter in pm.named_parts(0)}
    assert held["mixtures.0.up"] == (EXPERTS, 10, WIDTH)
    assert held["mixtures.0.down"] == (EXPERTS, 5, WIDTH)


@pytest.mark.slow
def test_other_axes_are_not_cut_over_replicas() -> None:
    with pytest.raises(ConfigError, match="cuts the batch, and experts beside it"):
        make_partitioned(ROUTED["index"].build(), mode="data", devices=2, constraints=Constraints(axes={"hidden": "data"}))
