"""GPT-2 of transformers in training has attention with dropout: its plan and its simulation for accelerators agree."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cost_models.simulator.result import Simulation
from partitioner import PartitionedModel, partition
from tests.support.running.slow_values import slow

ROWS, LENGTH, HEADS = 8, 1024, 16
SCORES = LENGTH * LENGTH * HEADS * torch.bfloat16.itemsize
"""Bytes of the scores of one row."""


@functools.cache
def model_and_example(device: str) -> tuple[GPT2LMHeadModel, dict[str, Any]]:
    with torch.device(device):
        config = GPT2Config(n_embd=512, n_layer=2, n_head=HEADS, n_positions=LENGTH, vocab_size=2048, use_cache=False)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def planned(mode: Any, recompute: str = "none", *, device: str = "meta", precision: str = "bf16-mixed") -> PartitionedModel:
    model, example = model_and_example(device)
    return partition(
        model,
        2,
        mode,
        example_kwargs=example,
        cluster="h100:1x2",
        precision=precision,
        recompute=recompute,
        memory_limit=2**40,
        progress=False,
    )


def has_scores(simulation: Simulation, rows: int) -> bool:
    """Return whether any value at a peak of memory is as large as the scores of a microbatch."""
    return any(each.bytes >= rows * SCORES for memory in simulation.memory for each in memory.alive)


@pytest.mark.parametrize("recompute", ["none", *slow("selective", "full")])
def test_a_pipeline_is_simulated_with_the_fused_kernel(recompute: str) -> None:
    pm = planned("pipeline", recompute)
    found = pm.simulate()
    assert pm.plan.step_time == pytest.approx(found.step_time, rel=0.04)
    assert not has_scores(found, ROWS // pm.plan.n_microbatches)


@pytest.mark.slow
def test_a_search_ranks_by_the_fused_kernel() -> None:
    pm = planned("auto")
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=1e-6)


@pytest.mark.slow
def test_real_tensors_are_simulated_as_meta_tensors_are() -> None:
    meta, real = (planned("pipeline", device=device, precision="bf16-true").simulate() for device in ("meta", "cpu"))
    assert real.step_time == pytest.approx(meta.step_time)
    assert real.peak_memory == meta.peak_memory


@pytest.mark.slow
def test_cpus_compute_scores() -> None:
    pm = planned("pipeline")
    assert has_scores(pm.simulate("cpu:1x2"), ROWS // pm.plan.n_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "data", "fsdp"])
def test_sharded_attention_is_planned_as_it_is_simulated(mode: Any) -> None:
    pm = planned(mode)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.04)


@pytest.mark.parametrize("recompute", ["selective", *slow("none")])
def test_ranks_keep_their_rows_of_masks_or_draw_them_again(recompute: str) -> None:
    pm = planned("data", recompute)
    assert max(pm.plan.memory) == pytest.approx(max(pm.simulate().peak_memory), rel=0.04)
