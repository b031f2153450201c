"""Simulated inference: times of the weights and the cache that a token reads, tables, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cost_models.hardware.clusters import Cluster, Device, Link
from partitioner import ConfigError, PartitionedModel, partition
from tests.support.models.language import causal_model

BANDWIDTH = 1e6
"""Bytes a second of a device that computes in no time."""

PROMPT = (torch.zeros(4, 8, dtype=torch.long),)


def cluster(n_devices: int) -> Cluster:
    device = Device("slow memory", {"float32": 1e15}, 2**30, BANDWIDTH)
    return Cluster([device] * n_devices, Link(0.0, 1e12))


@pytest.fixture(scope="module")
def alone() -> PartitionedModel:
    return partition(causal_model("gpt2"), 1, "model", example_inputs=PROMPT, cluster=cluster(1), progress=False)


def bytes_of(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.slow
def test_a_token_takes_the_time_to_read_the_weights(alone: PartitionedModel) -> None:
    (one,) = alone.simulate_inference((1,), prompt=8, new_tokens=4).batches
    weights = sum(parameter.numel() * parameter.element_size() for parameter in alone.parameters())
    assert weights / BANDWIDTH * 0.8 < one.per_token < weights / BANDWIDTH * 2.5  # embeddings are read in part; cache and activations
    assert one.latency == pytest.approx(one.first_token + 3 * one.per_token)
    assert one.throughput == pytest.approx(4 / one.latency)
    assert one.peak_memory[0] > weights
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_larger_batches_share_the_weights(alone: PartitionedModel) -> None:
    one, sixteen = alone.simulate_inference((1, 16), prompt=8, new_tokens=4).batches
    assert one.latency < sixteen.latency < 16 * one.latency
    assert sixteen.throughput > one.throughput


@pytest.mark.slow
def test_layers_cut_over_devices_answer_sooner(alone: PartitionedModel) -> None:
    pm = partition(causal_model("gpt2"), 2, "tensor", example_inputs=PROMPT, cluster=cluster(2), progress=False)
    (one,), (two,) = (each.simulate_inference((4,), prompt=8, new_tokens=4).batches for each in (alone, pm))
    assert 0.5 < two.per_token / one.per_token < 0.8
    assert max(two.peak_memory) < 0.75 * one.peak_memory[0]


@pytest.mark.slow
def test_the_table(alone: PartitionedModel) -> None:
    lines = str(alone.simulate_inference((1, 2), prompt=8, new_tokens=4)).splitlines()
    assert lines[0] == "prompts of 8 tokens, 4 new tokens a row"
    assert lines[2].split("  ")[-1] == "peak memory"
    assert len(lines) == 5
    assert len({len(line) for line in lines[2:]}) == 1


def test_what_is_refused(alone: PartitionedModel) -> None:
    with pytest.raises(ConfigError, match="are more than the 64 positions"):
        alone.simulate_inference(prompt=60, new_tokens=5)
    layer = nn.Linear(4, 4)
    pm = partition(layer, 2, "data", example_inputs=torch.ones(4, 4), progress=False)
    with pytest.raises(ConfigError, match="evaluation mode"):
        pm.simulate_inference()
    pm.eval()
    with pytest.raises(ConfigError, match="2 ranks share the rows of a batch, and 3 rows do not divide"):
        pm.simulate_inference((2, 3))
    with pytest.raises(ConfigError, match="generates no tokens"):
        pm.simulate_inference((2,), prompt=4)
    assert pm.simulate_inference((2,)).batches[0].throughput > 0
