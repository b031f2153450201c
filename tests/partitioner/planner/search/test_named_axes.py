"""Axes that a user names add to a search: nothing that is named makes the planner forget what is not."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
import torch
import transformers

from cost_models.hardware.clusters import Cluster
from partitioner import Constraints
from partitioner.options.precision import autocast_of
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}
LLAMA_405B: dict[str, Any] = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("heads",),
    ("ffn",),
    ("vocab",),
    ("sequence",),
    ("hidden",),
    ("sequence", "heads"),
    ("heads", "ffn", "vocab"),
    ("heads", "ffn", "vocab", "sequence"),
)


@functools.cache
def graph_of(precision: str | None, **sizes: Any) -> ModelGraph:
    with torch.device("meta"):
        config = transformers.LlamaConfig(num_hidden_layers=2, use_cache=False, attn_implementation="sdpa", **sizes)
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(2, sizes["max_position_embeddings"], dtype=torch.int64)
    hardware = Cluster.preset("h100", devices_per_node=8)
    return trace(model, (), {"input_ids": tokens, "labels": tokens}, True, autocast=autocast_of(precision, model, hardware))


def plan_with(graph: ModelGraph, names: tuple[str, ...], count: int) -> Plan:
    request = PlanRequest(
        mode="model",
        devices=("meta",) * count,
        memory_limit="64TiB",
        constraints=Constraints(axes=dict.fromkeys(names, "tensor")),
    )
    return plan_mesh(graph, Cluster.preset("h100", devices_per_node=count), request, None, Mesh((("tensor", count),)))


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_a_plan_with_fewer_names_is_no_slower_than_its_gap_says(precision: str | None) -> None:
    graph = graph_of(precision, **SMALL)
    plans = {names: plan_with(graph, names, 4) for names in SETS}
    for fewer, more in itertools.permutations(SETS, 2):
        if set(fewer) < set(more):
            gap = plans[fewer].gap
            assert gap is not None
            assert plans[fewer].step_time * (1 - gap) <= plans[more].step_time * (1 + 1e-9), (fewer, more)


@pytest.mark.slow
def test_the_sequence_over_tensor_is_sequence_parallelism() -> None:
    """Heads, feed-forward layers and the vocabulary are cut beside it, as without any name."""
    graph = graph_of("bf16-mixed", **LLAMA_405B)
    by_name, free = (plan_with(graph, names, 8) for names in (("sequence",), ()))
    sharded = {axis.partition("[")[0] for axis, _ in by_name.axes}
    assert sharded >= {"sequence", "heads", "ffn", "vocab"}
    assert by_name.step_time <= free.step_time * (1 + 1e-9)


@pytest.mark.parametrize("names", [(), pytest.param(("sequence",), marks=pytest.mark.slow)])
def test_tensor_parallelism_shards_weights_where_copies_take_less_time(names: tuple[str, ...]) -> None:
    """Weights are small beside activations: ranks that share the sequence alone need no messages in the forward, which is said."""
    plan = plan_with(graph_of("bf16-mixed", **SMALL | {"max_position_embeddings": 16384}), names, 4)
    sharded = {axis.partition("[")[0] for axis, _ in plan.axes}
    assert sharded >= {"heads", "ffn", "vocab", *names}
    if names:
        assert plan.prediction.axes_gap
        assert re.search(r"other axes than the mode means take less time: tensor 4, .* over tensor: \d+ % less", plan.prediction.searched)


@pytest.mark.slow
def test_an_axis_whose_calls_another_name_takes_is_refused_with_it() -> None:
    with pytest.raises(ConfigError, match="cut by head beside heads, which cut all that have it"):
        plan_with(graph_of("bf16-mixed", **SMALL), ("heads", "head"), 4)
