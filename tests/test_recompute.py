"""Recomputation: equal numbers, less memory, planned as it is lowered, and chosen only when memory asks for it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from partitioner import InfeasiblePlanError, PartitionedModel, partition
from partitioner.tracing.trace import trace
from passes.lower import Differentiation, cut_stages, differentiate_stages
from tests.models.zoo import case_named

CASE = case_named("gpt")
ROWS = 8
SMALL = 64
"""Bytes of position numbers, which every stage makes for itself."""


@functools.cache
def planned(recompute: str | None, memory_limit: int | None = None) -> PartitionedModel:
    instance = CASE.build(batch_size=ROWS)
    return partition(
        instance.model,
        devices=2,
        mode="pipeline",
        example_inputs=instance.args,
        example_kwargs=dict(instance.kwargs),
        schedule="1F1B",
        n_microbatches=4,
        recompute=recompute,
        memory_limit=memory_limit,
    )


@functools.cache
def saved_bytes(recompute: str) -> tuple[int, ...]:
    """For each stage the bytes that its lowered forward saves for one microbatch, memory that values share counted once."""
    plan = planned(recompute).plan
    instance = CASE.build(batch_size=ROWS)
    graph = trace(instance.model, instance.args, instance.kwargs)
    devices = [torch.device("cpu")] * 2
    everything = Differentiation(frozenset(graph.returned), frozenset(), frozenset(graph.parameters))
    lowered = differentiate_stages(cut_stages(graph, plan, devices), everything, recompute, devices)  # type: ignore[arg-type]
    found = []
    for stage in lowered.training:
        tensors = [value for value in stage.saved_values if isinstance(value, Tensor)]
        storages = {value.untyped_storage()._cdata: int(value.untyped_storage().nbytes()) for value in tensors}
        found.append(sum(storages.values()) // 4)
    return tuple(found)


@pytest.mark.parametrize(("recompute", "margin"), [("none", 0.0), ("selective", 0.25), ("full", 0.05)])
def test_predicted_activations_are_what_the_graphs_save(recompute: str, margin: float) -> None:
    """Never less than is saved; with ``"selective"`` a stage's last results count though no reader of its own needs them again."""
    for stage, saved in zip(planned(recompute).plan.stages, saved_bytes(recompute), strict=True):
        assert saved * 0.97 <= stage.activation_bytes <= saved * (1.03 + margin) + SMALL


def test_each_policy_saves_less() -> None:
    assert sum(saved_bytes("full")) < sum(saved_bytes("selective")) < sum(saved_bytes("none"))


def test_the_planner_recomputes_as_little_as_the_memory_allows() -> None:
    peaks = {recompute: max(planned(recompute).plan.memory) for recompute in ("none", "selective", "full")}
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    assert planned(None).plan.recompute == "none"
    for recompute, peak in peaks.items():
        assert planned(None, memory_limit=peak).plan.recompute == recompute
    with pytest.raises(InfeasiblePlanError):
        planned(None, memory_limit=peaks["full"] // 2)


def test_recomputing_takes_longer() -> None:
    times = [planned(recompute).plan.step_time for recompute in ("none", "selective", "full")]
    assert times == sorted(times)
    assert times[0] < times[2]
